"""The lessons' figures, one module per topic."""

from helpers.plots.autograd import gradients, graph_before_and_after, kept_per_step
from helpers.plots.collectives import (
    before_and_after,
    busiest_rank,
    bytes_sent,
    halves,
    hands,
    interrupted,
    latency_and_bandwidth,
)
from helpers.plots.dataparallel import (
    data_parallel_against_ddp,
    four_parts,
    idle_gpus,
    iteration,
    one_step,
    peaks_before_and_after,
    replica_sizes,
    share_bars,
    shares,
    split_grid,
    where_layers_run,
)
from helpers.plots.devices import memories, relabeled
from helpers.plots.memory import (
    against_k,
    against_segments,
    fitting,
    held_by_cause,
    memory_over_step,
    peaks_by_cause,
    step_by_cause,
    step_by_module,
    steps_by_cause,
    who_holds,
)
from helpers.plots.meshes import expert_load, held, mesh, ring_work
from helpers.plots.precision import (
    errors_by_outlier,
    errors_by_ranks,
    formats,
    losses,
    number_lines,
    scaled_numbers,
)
from helpers.plots.schedules import schedule, schedules
from helpers.plots.serving import (
    cache_steps,
    forwards,
    latency_and_throughput,
    memory_of_servers,
    predicted_and_published,
    queues,
    token_times,
)
from helpers.plots.style import COLORS, figure, show
from helpers.plots.timeline import launches, overlap, spans, timeline, timelines, traces
from helpers.plots.times import (
    gained,
    goodput,
    parts_of_time,
    same_batch,
    speedups,
    split_sizes,
    split_times,
    time_bars,
    tokens_that_hide,
)
from helpers.plots.training import (
    by_batch,
    digit_grid,
    first_to_differ,
    learned,
    learning_curves,
    network,
    repeated_times,
    resumed_curves,
)
