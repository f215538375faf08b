"""``record()`` and ``spend()``: how a program asks for virtual time."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from vgpu.memory import gpus
from vgpu.time import joint, module_names, recording
from vgpu.time.costs import CostModel
from vgpu.time.gc_paused import rarely_collected
from vgpu.time.recording import Recording
from vgpu.time.steps import Program
from vgpu.time.streams import priority_of, set_stream_number
from vgpu.time.trace import HOST, Timeline, in_order

assumed: dict[str, Any] = {}
"""Fields of CostModel that a virtual cluster gives to every recording."""


@contextmanager
def record(costs: CostModel | None = None, **changes: Any) -> Iterator[Timeline]:
    """Record the virtual time of what the block computes on virtual GPUs.

    costs: times from this model in place of the enabled GPU's. Any of its fields can be given by
    name, such as ``arithmetic_share=0.3`` or ``link="PCIe 4"``, as in ``replay``. The timeline is complete when the
    block ends; with ``async_tp`` it is timed then, and what the program asks for before that
    (``event.elapsed_time``) is of collectives and products in one piece. RuntimeError inside another
    recording, or without virtual GPUs.
    """
    costs = (costs or CostModel(gpus.by_index(0).spec)).changed(assumed).changed(changes)
    devices = [gpus.by_index(index).device for index in range(gpus.device_count())]
    timeline = Timeline(costs.spec.name.removeprefix("Virtual "), devices)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    timeline.ranks = [rank]
    program = Program(costs, rank, gpus.current_index(), gpus.device_count())
    made = Recording(costs, timeline, set_stream_number, priority_of, rank)
    try:
        with recording.begun(made), module_names.tracked(), rarely_collected():
            yield timeline
    finally:
        timeline.host_s, timeline.makespan_s = made.end()
        timeline.events = in_order(made.clock.player.events)
        program.steps = made.clock.steps
        program.races = [(r.device.index, replace(r, device=HOST)) for r in timeline.races]
        program.kept = made.kept
        timeline.programs = (program,)
        if costs.async_tp:  # what a product waits for is known only now
            again = joint.rebuilt(timeline.programs)
            timeline.events = again.events
            timeline.host_s, timeline.makespan_s = again.host_s, again.makespan_s


def spend(duration_s: float) -> None:
    """In a recording, let the host compute for so long: making a batch, say. Else nothing."""
    if recording.under_way is not None:
        recording.under_way.clock.spend(duration_s)


def sharing_the_interpreter(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    """``parallel_apply``, whose threads share one interpreter in a recording as well."""

    @functools.wraps(parallel_apply)
    def applied(modules: Any, *args: Any, **kwargs: Any) -> Any:
        if recording.under_way is None or len(modules) < 2:
            return parallel_apply(modules, *args, **kwargs)
        clock = recording.under_way.clock
        clock.hosts.fork(clock.host(), len(modules))
        try:
            return parallel_apply(modules, *args, **kwargs)
        finally:
            clock.hosts.join(clock.host())

    return applied
