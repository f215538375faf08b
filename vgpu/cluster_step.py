"""Run a program as rank 0 of a cluster that doesn't exist, and predict its second training step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from vgpu.collectives.cluster import Cluster, cluster
from vgpu.tensor.shapes import shapes_only
from vgpu.time.recording import record
from vgpu.time.timeline import Timeline, covered_s
from vgpu.torch_patches import device_module
from vgpu.units import format_bytes, format_seconds


@contextmanager
def predict_second_step(**options: Any) -> Iterator[None]:
    """Run the program in the block as rank 0 of a cluster, with tensors that are shapes.

    Recording starts after an optimizer's first step, which creates its state. After the second
    step, the result is printed, and SystemExit ends the program. ``options`` are those of
    ``cluster``. A program that reads a tensor's value before then ends with a NoValueError, because
    shapes have no values.
    """
    timelines: list[Timeline] = []
    with ExitStack() as block:
        made = block.enter_context(cluster(**options))
        # The cluster's process group already exists, so a program that creates one gets that one.
        block.enter_context(mock.patch.object(dist, "init_process_group", lambda *_, **__: None))
        block.enter_context(shapes_only())
        recording = block.enter_context(ExitStack())

        def after_step(*_: Any) -> None:
            if not timelines:
                device_module.reset_peak_memory_stats()
                timelines.append(recording.enter_context(record()))
                return
            recording.close()
            print(_report(made, timelines[0]), flush=True)
            raise SystemExit

        block.callback(register_optimizer_step_post_hook(after_step).remove)
        yield
        taken = len(timelines)
        raise SystemExit(
            f"python -m vgpu --cluster: this records the second optimizer step, but the program "
            f"took only {taken}: have it take at least two"
        )


def _report(made: Cluster, timeline: Timeline) -> str:
    events = timeline.of(made.device)
    kernels = [event for event in events if event.kind == "kernel"]
    collectives = [event for event in events if event.kind == "collective"]
    step_s, computing_s = timeline.makespan_s, covered_s(kernels)
    busy_s = covered_s(kernels + collectives)
    parts = {
        "computing": computing_s,
        "exposed collectives": busy_s - computing_s,
        "neither": step_s - busy_s,
    }
    lines = [str(made), f"a step takes {format_seconds(step_s)} of virtual time"]
    lines += [f"  {time_s / step_s:6.1%} {what}" for what, time_s in parts.items()]
    peak, of = device_module.max_memory_allocated(), made.gpu.memory_bytes
    lines.append(f"peak memory: {format_bytes(peak)} of {format_bytes(of)} allocated")
    return "\n".join(lines)
