"""``record()``: tells the clock of every operation that is computed on a virtual GPU.

Left out: CPU operations take no virtual time (``spend`` adds some), and the caching allocator,
which on CUDA may reuse a block too early where ``record_stream`` is forgotten.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from helpers.vgpu.device import gpus
from helpers.vgpu.device.gpus import VirtualGPU
from helpers.vgpu.device.links import get_link
from helpers.vgpu.dispatch import handlers, tensor
from helpers.vgpu.dispatch.tensor import VirtualTensor
from helpers.vgpu.timing import clock as clocks
from helpers.vgpu.timing import module_names, signatures
from helpers.vgpu.timing.clock import Clock
from helpers.vgpu.timing.costs import CostModel, Work, work_of
from helpers.vgpu.timing.lanes import Done, HostTime, StreamTime
from helpers.vgpu.timing.races import Accesses, in_backward, poisoned, replaced
from helpers.vgpu.timing.streams import current_stream_number
from helpers.vgpu.timing.trace import Timeline
from helpers.vgpu.timing.traits import tensors_in, traits_of

active: "Recorder | None" = None


@contextmanager
def record(costs: CostModel | None = None, **changes: Any) -> Iterator[Timeline]:
    """Record the virtual time of what the block computes on virtual GPUs.

    costs: times from this model in place of the enabled GPU's. Any of its fields can be given by
    name, such as ``share_of_peak=0.3`` or ``link="PCIe 4"``. The timeline is complete when the
    block ends. RuntimeError inside another recording, or without virtual GPUs.
    """
    global active
    if active is not None:
        raise RuntimeError("a recording is under way already: end its block before the next one")
    costs = costs or CostModel(gpus.by_index(0).spec)
    if "link" in changes:
        changes["link"] = get_link(changes["link"])
    costs = replace(costs, **changes)
    devices = [gpus.by_index(index).device for index in range(gpus.device_count())]
    timeline = Timeline(costs.spec.name.removeprefix("Virtual "), devices)
    clock = Clock(costs, current_stream_number)
    active = Recorder(clock, timeline)
    clocks.active = clock
    tensor.set_interceptor(dispatch)
    # Events are many and stay: to look through them for cycles again and again would be in vain.
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        with module_names.tracked():
            yield timeline
    finally:
        gc.set_threshold(*thresholds)
        tensor.set_interceptor(None)
        active = clocks.active = None
        timeline.host_s, timeline.makespan_s = clock.end()
        timeline.events = sorted(
            clock.events, key=lambda e: (e.start_s, str(e.device), e.stream, e.launch_s)
        )


def spend(duration_s: float) -> None:
    """In a recording, let the host compute for so long: making a batch, say. Else nothing."""
    if clocks.active is not None:
        clocks.active.spend(duration_s)


def sharing_the_interpreter(parallel_apply: Callable) -> Callable:
    """``parallel_apply``, whose threads share one interpreter in a recording as well."""

    @functools.wraps(parallel_apply)
    def applied(modules: Any, *args: Any, **kwargs: Any) -> Any:
        clock = clocks.active
        if clock is None or len(modules) < 2:
            return parallel_apply(modules, *args, **kwargs)
        clock.fork(len(modules))
        try:
            return parallel_apply(modules, *args, **kwargs)
        finally:
            clock.join()

    return applied


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one operation as ever, and record it."""
    if active is None:  # a thread that outlives the recording
        return tensor.run(func, args, kwargs)
    return active.run(func, args, kwargs)


class Recorder:
    """One recording: names, streams and races around a clock."""

    def __init__(self, clock: Clock, timeline: Timeline) -> None:
        self.clock = clock
        self.timeline = timeline
        self.accesses = Accesses(clock, timeline)
        # By a node's number. Each thread counts for itself, so DataParallel's are kept apart.
        self._nodes: dict[int, tuple[str, str]] = {}
        self._nodes_of_forks: dict[int, tuple[str, str]] = {}
        # A GPU and the number of its stream.
        self._stream_of_node: dict[int, tuple[int, int]] = {}
        self._seconds: dict[Work, float] = {}
        self._work: dict[Any, Work] = {}

    # Real tensors

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Compute ``func`` with values, and record it."""
        traits = traits_of(func)
        if traits.copies:
            return self._run_copy(func, args, kwargs)
        inputs = [
            t for t in tensors_in((args, tuple(kwargs.values()))) if isinstance(t, VirtualTensor)
        ]
        gpu = inputs[0]._gpu if inputs else None
        if traits.free:
            if gpu is not None:
                self.note_node(traits.name, gpu, self.clock.host())
            return tensor.run(func, args, kwargs)
        if gpu is not None:
            stream, host, launch_s = self.place(traits.name, gpu)
            written = traits.written(args, kwargs)
            late = self.accesses.check(traits.name, inputs, written, stream, host, launch_s)
            if late:
                args, kwargs = replaced(late, written, args, kwargs)
        result = tensor.run(func, args, kwargs)
        if gpu is None:
            made = next((t for t in tensors_in(result) if isinstance(t, VirtualTensor)), None)
            if made is None:
                return result
            gpu, written = made._gpu, []
            stream, host, launch_s = self.place(traits.name, gpu)
        work = self._work_of(func, args, kwargs, result)
        done = self.kernel(traits.name, gpu, stream, host, launch_s, work)
        outputs = [t for t in tensors_in(result) if isinstance(t, VirtualTensor)]
        self.accesses.note(done, inputs, [*written, *outputs])
        if traits.waits:
            self.clock.host_waits([stream], traits.name, host)
        return result

    def _work_of(self, func: Any, args: tuple, kwargs: dict, result: Any) -> Work:
        try:
            key = signatures.signature(func, args, kwargs)
        except NotImplementedError:  # sparse
            return work_of(func, args, kwargs, result)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = work_of(func, args, kwargs, result)
        return work

    def _run_copy(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """``_to_copy`` and ``copy_``: the operators that may cross devices."""
        into = args[0] if len(args) > 1 else None
        source = args[-1] if into is None else args[1]
        late = self.check_source(source)
        if late and into is None:
            args = (poisoned(source), *args[1:])
        elif late:
            args = (into, poisoned(source), *args[2:])
        result = tensor.run(func, args, kwargs)
        waits = not (kwargs.get("non_blocking") or (into is not None and args[2:3] == (True,)))
        self.copied(source, result, into is not None, waits)
        return result

    # What happened; also for tensors that are only shapes

    def check_source(self, source: Any) -> list[Any]:
        """Before a copy: ``source`` in a list where it is not written yet; a race is noted."""
        gpu = gpu_of(source)
        if gpu is None:
            return []
        stream, host, launch_s = self.place("copy", gpu, note=False)
        return self.accesses.check("copy", [source], [], stream, host, launch_s)

    def copied(self, source: Any, target: Any, in_place: bool, waits: bool) -> None:
        """Record a copy from tensor to tensor; each may be on a GPU or on the host."""
        source_gpu, target_gpu = gpu_of(source), gpu_of(target)
        clock = self.clock
        if source_gpu is None and target_gpu is None:
            return
        size_bytes = source.numel() * source.element_size()
        if source_gpu is target_gpu:
            assert source_gpu is not None
            stream, host, launch_s = self.place("copy", source_gpu)
            written = [target] if in_place else []
            self.accesses.check("copy", [], written, stream, host, launch_s)
            work = Work(0, size_bytes + target.numel() * target.element_size(), False)
            done = self.kernel("copy", source_gpu, stream, host, launch_s, work)
            self.accesses.note(done, [source], [target])
            return
        there = here = None
        if target_gpu is not None:
            there, host, launch_s = self.place("copy", target_gpu)
            if in_place:
                self.accesses.check("copy", [], [target], there, host, launch_s)
        if source_gpu is not None:
            here, host, launch_s = self.place("copy", source_gpu)
        pinned = source_gpu is not None or handlers.is_cpu_pinned(source)
        between = here is not None and there is not None
        blocking = not between and (waits or not pinned)
        dones = clock.copy(here, there, host, launch_s, size_bytes, blocking)
        if between and target_gpu is not None and in_backward():
            # The next node runs in the thread of the target's device.
            engine = clock.engine(target_gpu)
            engine.now_s = max(engine.now_s, host.now_s)
        if source_gpu is not None:
            self.accesses.note(dones[0], [source], [])
        if target_gpu is not None:
            self.accesses.note(dones[-1], [], [target])

    def place(
        self, name: str, gpu: VirtualGPU, note: bool = True
    ) -> tuple[StreamTime, HostTime, float]:
        """The stream that gets the next operation on ``gpu``, the thread that hands it over, and
        how long the handing over takes. Tells the thread which module it works for.

        note: False for the source of a copy, whose backward runs on the target's stream.
        """
        clock = self.clock
        if not in_backward():
            host = clock.host()
            if note:
                self.note_node(name, gpu, host)
            host.module, host.backward = module_names.current(), False
            stream = clock.stream(gpu, current_stream_number(gpu.index))
            return stream, host, clock.model.python_launch_s
        number, module = 0, ""
        node = torch._C._current_autograd_node()
        if node is not None:
            position = node._sequence_nr()
            # The engine makes one stream current; on other GPUs the default ones stay so.
            index, forward_number = self._stream_of_node.get(position, (gpu.index, 0))
            number = forward_number if index == gpu.index else 0
            module = self._module_of(node, position)
        engine = clock.engine(gpu)
        engine.module, engine.backward = module, True
        stream = clock.stream(gpu, number)
        if number:
            clock.in_backward(stream)
        return stream, engine, clock.model.engine_launch_s

    def note_node(self, name: str, gpu: VirtualGPU, host: HostTime) -> None:
        """Remember the module and stream of the autograd node that was made last.

        torch makes an operation's node before it computes the operation.
        """
        if not torch.is_grad_enabled():
            return
        position = torch._C._autograd._get_sequence_nr() - 1
        nodes = self._nodes if host is self.clock.main else self._nodes_of_forks
        if position not in nodes:
            nodes[position] = (name, module_names.current())
            number = current_stream_number(gpu.index)
            if number:
                self._stream_of_node[position] = (gpu.index, number)

    def _module_of(self, node: Any, position: int) -> str:
        """The module whose forward made a node."""
        noted = self._nodes.get(position)
        if self._nodes_of_forks:
            # Another thread may have used the same number: the name must fit as well.
            name = node.name().lower()
            noted = next(
                (
                    pair
                    for pair in (noted, self._nodes_of_forks.get(position))
                    if pair and name.startswith(pair[0].replace("_", ""))
                ),
                None,
            )
        return noted[1] if noted else ""

    def kernel(
        self,
        name: str,
        gpu: VirtualGPU,
        stream: StreamTime,
        host: HostTime,
        launch_s: float,
        work: Work,
    ) -> Done:
        duration_s = self._seconds.get(work)
        if duration_s is None:
            duration_s = self._seconds[work] = self.clock.model.kernel_time_s(work)
        return self.clock.kernel(
            name, gpu, stream, host, launch_s, duration_s, work.flop, work.size_bytes
        )


def gpu_of(value: Any) -> VirtualGPU | None:
    """The GPU of a tensor; None for one on the host."""
    gpu = getattr(value, "_gpu", None)
    return gpu if isinstance(gpu, VirtualGPU) else None
