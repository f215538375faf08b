"""Figures of the lessons; they only read records."""

from helpers.plots.autograd import gradients, graph_before_and_after, kept_per_step
from helpers.plots.collectives import (
    before_and_after,
    busiest_rank,
    bytes_sent,
    hands,
    interrupted,
    latency_and_bandwidth,
)
from helpers.plots.dataparallel import (
    data_parallel_against_ddp,
    four_parts,
    iteration,
    one_step,
    peaks_before_and_after,
    replica_sizes,
    share_bars,
    shares,
)
from helpers.plots.devices import memories, relabelled
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
from helpers.plots.schedules import schedule, schedules
from helpers.plots.serving import forwards, latency_and_throughput, queues, token_times
from helpers.plots.style import COLOURS, figure, show
from helpers.plots.timeline import timeline, timelines
from helpers.plots.times import gained, goodput, parts_of_time, same_batch, split_sizes, split_times
from helpers.plots.training import (
    by_batch,
    digit_grid,
    learned,
    learning_curves,
    network,
    repeated_times,
    resumed_curves,
)

__all__ = [
    "COLOURS",
    "against_k",
    "against_segments",
    "before_and_after",
    "busiest_rank",
    "by_batch",
    "bytes_sent",
    "data_parallel_against_ddp",
    "digit_grid",
    "expert_load",
    "figure",
    "fitting",
    "forwards",
    "four_parts",
    "gained",
    "goodput",
    "gradients",
    "graph_before_and_after",
    "hands",
    "held",
    "held_by_cause",
    "interrupted",
    "iteration",
    "kept_per_step",
    "latency_and_bandwidth",
    "latency_and_throughput",
    "learned",
    "learning_curves",
    "memories",
    "memory_over_step",
    "mesh",
    "network",
    "one_step",
    "parts_of_time",
    "peaks_before_and_after",
    "peaks_by_cause",
    "queues",
    "relabelled",
    "repeated_times",
    "replica_sizes",
    "resumed_curves",
    "ring_work",
    "same_batch",
    "schedule",
    "schedules",
    "share_bars",
    "shares",
    "show",
    "split_sizes",
    "split_times",
    "step_by_cause",
    "step_by_module",
    "steps_by_cause",
    "timeline",
    "timelines",
    "token_times",
    "who_holds",
]
