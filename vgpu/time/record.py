"""``record()`` and ``spend()``: how a program asks for virtual time."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from vgpu.memory import gpus
from vgpu.time import recording
from vgpu.time.call_sites import compiled_call, in_compiled_call, modules_tracked
from vgpu.time.costs import CostModel
from vgpu.time.recording import Recording
from vgpu.time.simulate import rarely_collected, run
from vgpu.time.timeline import HOST, Timeline, in_order

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
    under_way = Recording(costs, timeline, rank)
    try:
        with recording.begun(under_way), modules_tracked(), rarely_collected():
            yield timeline
    finally:
        gpus.streams_of_nodes.clear()
        with rarely_collected():
            recorder = under_way.recorder
            program = recorder.end()
            # With async_tp, what a product waits for is known only now: simulate all steps again.
            simulator = run(program) if costs.async_tp else recorder.simulated()
        program.races = [(r.device.index, replace(r, device=HOST)) for r in timeline.races]
        timeline.programs = (program,)
        timeline.host_s, timeline.makespan_s = simulator.end()
        timeline.events = in_order(simulator.trace)


def spend(duration_s: float) -> None:
    """In a recording, let the host compute for so long: making a batch, say. Else nothing."""
    if recording.under_way is not None:
        recording.under_way.recorder.spend(duration_s)


@contextmanager
def compiled() -> Iterator[None]:
    """In a recording, elementwise operations of the block are fused, and those of its backward."""
    with compiled_call():
        yield
    if recording.under_way is not None and not in_compiled_call():
        recording.under_way.recorder.break_graph(None)


def sharing_the_interpreter(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    """``parallel_apply``, whose threads share one interpreter in a recording as well."""

    @functools.wraps(parallel_apply)
    def applied(modules: Any, *args: Any, **kwargs: Any) -> Any:
        if recording.under_way is None or len(modules) < 2:
            return parallel_apply(modules, *args, **kwargs)
        recorder = recording.under_way.recorder
        recorder.threads.fork(recorder.host(), len(modules))
        try:
            return parallel_apply(modules, *args, **kwargs)
        finally:
            recorder.threads.join(recorder.host())

    return applied
