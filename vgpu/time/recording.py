"""One recording of virtual time, and which one is on.

A recording is told of every operation on a virtual GPU, before and after it has run, with values or
as shapes only (vgpu/tensor/observer.py). call_sites.py says who issues it: which stream, which thread
of the host, which module, in which pass. The recorder then gets one step.

Left out: operations on the CPU take no virtual time (``spend`` adds some).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from vgpu.memory.gpus import VirtualGPU, in_backward
from vgpu.tensor import copies, observer
from vgpu.tensor.lookup import Result, signature_of
from vgpu.tensor.observer import Operation, virtual_among
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time.call_sites import CallSites
from vgpu.time.costs import CostModel, Workload, work_of
from vgpu.time.happens_before import Enqueued, RecordedStream
from vgpu.time.launching import Launching
from vgpu.time.races import Accesses, poisoned, replaced
from vgpu.time.recorder import Recorder
from vgpu.time.timeline import Timeline

under_way: "Recording | None" = None


@contextmanager
def begun(recording: "Recording") -> Iterator[None]:
    """The recording is on in the block, in all threads; RuntimeError inside another."""
    if under_way is not None:
        raise RuntimeError("a recording is under way already: end its block before the next one")
    _switch_to(recording)
    try:
        yield
    finally:
        _switch_to(None)


@contextmanager
def paused() -> Iterator[None]:
    """What happens in the block is not recorded, because the caller records it as a whole."""
    recording = under_way
    _switch_to(None)
    try:
        yield
    finally:
        _switch_to(recording)


def _switch_to(recording: "Recording | None") -> None:
    global under_way
    observer.recording = under_way = recording


class Part(Protocol):
    """This rank's part of a collective."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    made: list[torch.Tensor]  # outputs that are new

    size_bytes: int

    @property
    def ranks(self) -> list[int]: ...

    @property
    def group_name(self) -> str: ...


class Recording:
    """Call sites, launches and races around a recorder."""

    def __init__(self, costs: CostModel, timeline: Timeline, rank: int = 0) -> None:
        self.recorder = Recorder(costs, rank)
        self.call_sites = CallSites(self.recorder)
        self._accesses = Accesses(self.recorder, timeline)
        self._launching = Launching(self.recorder, self._accesses)
        self.stream_numbers: dict[tuple[Any, ...], int] = {}  # of process groups
        self._kept: list[object] = []
        self._work: dict[tuple[Any, ...], Workload] = {}

    # Operations, as vgpu/tensor/tensor.py tells of them

    def before(self, operation: Operation) -> None:
        """Find the stream and the thread; what is read too early becomes garbage."""
        info, inputs, gpu = operation.info, operation.inputs, operation.gpu
        if info.launches_nothing:
            self.call_sites.note(info.name, gpu)
            return
        stream, host = operation.stream, operation.host = self.call_sites.of(info.name, gpu)
        written = operation.written
        self._launching.before(stream, host, inputs, written)
        late = self._accesses.check(info.name, inputs, written, stream, host)
        if late and not late[0]._inner.is_meta:
            operation.args, operation.kwargs = replaced(
                late, written, operation.args, operation.kwargs
            )

    def after(self, operation: Operation, outputs: Any, result: Result | None) -> None:
        """Record it as one step."""
        info, inputs, written = operation.info, operation.inputs, operation.written
        if info.launches_nothing:
            if info.allocates:
                done = self._allocation(info.name, operation.gpu)
                self._accesses.note_allocations(done, virtual_among((outputs,)))
            return
        stream, host = operation.stream, operation.host
        work = result.work if result is not None else None
        work = work or self._work_of(operation, outputs, result)
        done = self._launching.kernel(info.name, info.fuses, stream, host, inputs, work)
        self._accesses.note(done, inputs, written)
        if result is not None and result.alone is not None and not written:
            outputs._block.made = done  # note_allocations, for most shapes
        elif not (written and outputs is written[0]):  # an in-place operation returns its argument
            made = virtual_among((outputs,))
            self._accesses.note_allocations(
                done, [one for one in made if not _is_among(one, written)]
            )
        if (info.waits or info.indexes) and info.waits_for(operation.args):
            self.recorder.host_waits([stream], info.name, host)

    def _work_of(self, operation: Operation, outputs: Any, result: Result | None) -> Workload:
        """What an operation costs; known by its signature, which shapes have looked up."""
        info, args, kwargs = operation.info, operation.args, operation.kwargs
        if result is not None:
            work = result.work = work_of(info.func, args, kwargs, outputs)
            return work
        try:
            signature = signature_of(info, args, kwargs, [])
        except NotImplementedError:  # sparse
            return work_of(info.func, args, kwargs, outputs)
        known = self._work.get(signature)
        if known is None:
            known = self._work[signature] = work_of(info.func, args, kwargs, outputs)
        return known

    def _allocation(self, name: str, gpu: VirtualGPU) -> Enqueued:
        stream, host = self.call_sites.of(name, gpu)
        return self.recorder.allocation(name, stream, host.backward)

    def record_stream(self, used: VirtualTensor, stream: torch.Stream) -> None:
        """``used.record_stream(stream)``; nothing to do for a shape on the host."""
        if gpu_of(used) is not None:
            time = self.recorder.stream(used._gpu, stream.stream_id)
            self._accesses.record_stream(used, time)

    def before_copy(self, source: torch.Tensor) -> torch.Tensor:
        """What a copy reads: ``source``, or garbage where it is not written yet; a race is noted."""
        if not isinstance(source, VirtualTensor) or gpu_of(source) is None:
            return source
        stream, host = self.call_sites.of("copy", source._gpu, note=False)
        self._launching.before(stream, host, [source], [])
        late = self._accesses.check("copy", [source], [], stream, host)
        return poisoned(source) if late and not source._inner.is_meta else source

    def after_copy(
        self, source: torch.Tensor, target: torch.Tensor, in_place: bool, waits: bool
    ) -> None:
        """Record a copy from tensor to tensor; each may be on a GPU or on the host."""
        source_gpu, target_gpu = gpu_of(source), gpu_of(target)
        read = [source] if source_gpu and isinstance(source, VirtualTensor) else []
        written = [target] if target_gpu and isinstance(target, VirtualTensor) else []
        size_bytes = source.numel() * source.element_size()
        overwritten = written if in_place else []
        if source_gpu is target_gpu:
            if source_gpu is None:
                return
            stream, host = self.call_sites.of("copy", source_gpu)
            self._launching.before(stream, host, [], overwritten)
            self._accesses.check("copy", [], overwritten, stream, host)
            work = Workload(0, size_bytes + target.numel() * target.element_size())
            done = self._launching.kernel("copy", True, stream, host, read, work)
            self._accesses.note(done, read, overwritten)
            if not in_place:
                self._accesses.note_allocations(done, written)
            return
        there = here = None
        operands = self._launching.operands("copy", read, self.recorder.host())
        if target_gpu is not None:
            there, host = self.call_sites.of("copy", target_gpu)
            self._launching.before(there, host, [], overwritten)
            self._accesses.check("copy", [], overwritten, there, host)
        if source_gpu is not None:
            here, host = self.call_sites.of("copy", source_gpu)
        pinned = source_gpu is not None or copies.is_cpu_pinned(source)
        between = source_gpu is not None and target_gpu is not None
        blocking = not between and (waits or not pinned)
        dones = self.recorder.copy(here, there, host, size_bytes, blocking, operands)
        if between and target_gpu is not None and in_backward():
            # The next node runs in the thread of the target's device.
            engine = self.recorder.threads.engine(target_gpu.index)
            self.recorder.join_threads(engine, [host])
        self._accesses.note(dones[0], read, [])
        self._accesses.note(dones[-1], [], overwritten)
        if not in_place:
            self._accesses.note_allocations(dones[-1], written)

    def collective(self, name: str, size_bytes: int, gpus: Sequence[VirtualGPU]) -> None:
        """Record one collective of the GPUs, on their current streams."""
        places = [self.call_sites.of(name, gpu, note=False) for gpu in gpus]
        streams = [stream for stream, _ in places]
        for stream in streams:
            self.recorder.break_graph(stream)
        self.recorder.local_collective(name, streams, places[0][1], size_bytes)

    def joined(self, name: str, gpu: VirtualGPU, part: "Part", number: int) -> Enqueued:
        """Record a collective of a process group, on the group's stream of this number.

        The stream waits for the current one, as NCCL's does.
        """
        current, host = self.call_sites.of(name, gpu, note=False)
        read, written, made = (
            virtual_among(part.inputs),
            virtual_among(part.outputs),
            virtual_among(part.made),
        )
        stream = self.recorder.stream(gpu, number)
        self._launching.before(stream, host, read, written)
        operands = self._launching.operands(name, read, host)
        self.recorder.wait_enqueued(stream, current)
        self._accesses.check(name, read, written, stream, host)
        done = self.recorder.group_collective(
            name,
            stream,
            host,
            part.size_bytes,
            part.ranks,
            part.group_name,
            current,
            operands,
        )
        self._accesses.note(done, read, [*written, *made])
        for used in (*read, *written, *made):  # NCCL's side keeps them until it has ended
            self._accesses.record_stream(used, stream)
        return done

    def wait_for(self, done: Enqueued, gpu: VirtualGPU, by_host: bool = False) -> None:
        """The current stream of the GPU, or the host, goes on when a collective has ended.

        A compiled program ends before it: what the stream has got so far does not wait.
        """
        current, host = self.call_sites.of("wait", gpu, note=False)
        if by_host:
            self.recorder.host_waits([done.stream], done.operation, host)
        else:
            self.recorder.break_graph(current)
            self.recorder.wait_operation(current, done)

    def wait_for_last_write(self, tensor: VirtualTensor) -> None:
        """``wait_tensor``: the current stream goes on when the tensor has been written.

        It stands within compiled programs: chains go on across it.
        """
        done = self._accesses.last_write(tensor) if gpu_of(tensor) is not None else None
        if done is not None:
            current, _ = self.call_sites.of("wait", tensor._gpu, note=False)
            self.recorder.wait_operation(current, done)

    def keep(self, work: object) -> None:
        """Let something live as long as the recording."""
        self._kept.append(work)

    def synchronize(self, streams: Sequence[RecordedStream]) -> None:
        """The host goes on when all work given to the streams has ended."""
        for stream in streams:
            self.recorder.break_graph(stream)
        self.recorder.host_waits(streams, "synchronize", self.recorder.host())


def _is_among(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def gpu_of(value: torch.Tensor) -> VirtualGPU | None:
    """The GPU of a tensor; None for one on the host."""
    gpu = getattr(value, "_gpu", None)
    return gpu if isinstance(gpu, VirtualGPU) else None
