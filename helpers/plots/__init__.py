"""Figures of the lessons; they only read records."""

from helpers.plots.collectives import before_and_after, busiest_rank
from helpers.plots.ddp import bytes_sent, hands, interrupted
from helpers.plots.iteration import four_parts, iteration, one_step, peaks_before_and_after
from helpers.plots.memory import (
    against_k,
    against_segments,
    fitting,
    peaks_by_cause,
    step_by_cause,
    step_by_module,
    steps_by_cause,
)
from helpers.plots.one_device.autograd import gradients, graph_before_and_after, kept_per_step
from helpers.plots.one_device.network import network
from helpers.plots.one_device.places import memories, relabelled
from helpers.plots.one_device.training import digit_grid, learning_curves, resumed_curves
from helpers.plots.parallel.meshes import expert_load, mesh, ring_work
from helpers.plots.parallel.plans import by_batch, goodput, latency_and_bandwidth, same_batch
from helpers.plots.parallel.splits import gained, held, split_times
from helpers.plots.pipeline import data_parallel_against_ddp, parts_of_time, split_sizes
from helpers.plots.repeats import repeated_times
from helpers.plots.schedules import schedule, schedules
from helpers.plots.sharding import held_by_cause, learned, memory_over_step, who_holds
from helpers.plots.shares import replica_sizes, share_bars, shares
from helpers.plots.style import COLOURS, figure, show
from helpers.plots.timeline import timeline, timelines

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
    "who_holds",
]
