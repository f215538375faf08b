"""One recording of virtual time, and which one is on.

A recording is told of every operation on a virtual GPU, before and after it has run, with values or
as shapes only (vgpu/tensor/observer.py). Its places (call_sites.py) say what asked for it: which
stream, which thread of the host, which module, in which pass. The clock then says when it happens.

Left out: operations on the CPU take no virtual time (``spend`` adds some).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor import copies, observer
from vgpu.tensor.lookup import Result, signature_of
from vgpu.tensor.observer import Operation, virtual_among
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time.backward import in_backward
from vgpu.time.call_sites import Places
from vgpu.time.clock import Clock
from vgpu.time.costs import CostModel, Work, work_of
from vgpu.time.fusion import Fusion
from vgpu.time.lanes import Done, StreamTime
from vgpu.time.launching import Launching
from vgpu.time.races import Accesses, poisoned, replaced
from vgpu.time.trace import Timeline

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

    given: list[torch.Tensor]
    received: list[torch.Tensor]
    made: list[torch.Tensor]  # received in tensors that are new

    @property
    def size_bytes(self) -> int: ...

    @property
    def ranks(self) -> list[int]: ...

    @property
    def group_name(self) -> str: ...


class Recording:
    """Places, launches and races around a clock."""

    def __init__(
        self,
        costs: CostModel,
        timeline: Timeline,
        set_stream: Callable[[int], int | None],
        priority_of: Callable[[int], int],
        rank: int = 0,
    ) -> None:
        """set_stream: for the index of a GPU, the number of the stream that the thread has set.

        priority_of: for the number of a stream, its priority.
        """
        self.clock = Clock(costs, priority_of, self.settle, rank)
        self.places = Places(self.clock, set_stream)
        self._accesses = Accesses(self.clock, timeline)
        fusion = Fusion(self.clock, self._accesses.last_write) if costs.fuses else None
        self._launching = Launching(self.clock, fusion)
        self.stream_numbers: dict[tuple[Any, ...], int] = {}  # of process groups
        self._kept: list[object] = []
        self._work: dict[tuple[Any, ...], Work] = {}

    # Operations, as vgpu/tensor/tensor.py tells of them

    def before(self, operation: Operation) -> None:
        """Find the stream and the thread; what is read too early becomes garbage."""
        info, inputs, gpu = operation.info, operation.inputs, operation.gpu
        if info.launches_nothing:
            self.places.note(info.name, gpu)
            return
        stream, host = operation.stream, operation.host = self.places.of(info.name, gpu)
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
                self._accesses.note_made(done, virtual_among((outputs,)))
            return
        stream, host = operation.stream, operation.host
        work = result.work if result is not None else None
        work = work or self._work_of(operation, outputs, result)
        done = self._launching.kernel(info.name, info.fuses, stream, host, inputs, work)
        self._accesses.note(done, inputs, written)
        if result is not None and result.alone is not None and not written:
            outputs._block.made = done  # note_made, for most shapes
        elif not (written and outputs is written[0]):  # an in-place operation returns its argument
            made = virtual_among((outputs,))
            self._accesses.note_made(done, [one for one in made if not _is_among(one, written)])
        if (info.waits or info.indexes) and info.waits_for(operation.args):
            self.clock.host_waits([stream], info.name, host)

    def _work_of(self, operation: Operation, outputs: Any, result: Result | None) -> Work:
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

    def _allocation(self, name: str, gpu: VirtualGPU) -> Done:
        stream, host = self.places.of(name, gpu)
        return self.clock.allocation(name, stream, host.backward)

    def record_stream(self, used: VirtualTensor, stream: torch.Stream) -> None:
        """``used.record_stream(stream)``; nothing to do for a shape on the host."""
        if gpu_of(used) is not None:
            time = self.clock.stream(used._gpu, stream.stream_id)
            self._accesses.record_stream(used, time)

    def before_copy(self, source: torch.Tensor) -> torch.Tensor:
        """What a copy reads: ``source``, or garbage where it is not written yet; a race is noted."""
        if not isinstance(source, VirtualTensor) or gpu_of(source) is None:
            return source
        stream, host = self.places.of("copy", source._gpu, note=False)
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
            stream, host = self.places.of("copy", source_gpu)
            self._launching.before(stream, host, [], overwritten)
            self._accesses.check("copy", [], overwritten, stream, host)
            work = Work(0, size_bytes + target.numel() * target.element_size())
            done = self._launching.kernel("copy", True, stream, host, read, work)
            self._accesses.note(done, read, overwritten)
            if not in_place:
                self._accesses.note_made(done, written)
            return
        there = here = None
        operands = self._launching.operands("copy", read, self.clock.host())
        if target_gpu is not None:
            there, host = self.places.of("copy", target_gpu)
            self._launching.before(there, host, [], overwritten)
            self._accesses.check("copy", [], overwritten, there, host)
        if source_gpu is not None:
            here, host = self.places.of("copy", source_gpu)
        pinned = source_gpu is not None or copies.is_cpu_pinned(source)
        between = source_gpu is not None and target_gpu is not None
        blocking = not between and (waits or not pinned)
        dones = self.clock.copy(here, there, host, size_bytes, blocking, operands)
        if between and target_gpu is not None and in_backward():
            # The next node runs in the thread of the target's device.
            engine = self.clock.hosts.engine(target_gpu.index)
            self.clock.follow(engine, host)
        self._accesses.note(dones[0], read, [])
        self._accesses.note(dones[-1], [], overwritten)
        if not in_place:
            self._accesses.note_made(dones[-1], written)

    def collective(self, name: str, size_bytes: int, gpus: Sequence[VirtualGPU]) -> None:
        """Record one collective of the GPUs, on their current streams."""
        places = [self.places.of(name, gpu, note=False) for gpu in gpus]
        streams = [stream for stream, _ in places]
        for stream in streams:
            self.settle(stream)
        self.clock.collective(name, streams, places[0][1], size_bytes)

    def joined(self, name: str, gpu: VirtualGPU, part: "Part", number: int) -> Done:
        """Record a collective of a process group, on the group's stream of this number.

        The stream waits for the current one, as NCCL's does.
        """
        current, host = self.places.of(name, gpu, note=False)
        read, written, made = (
            virtual_among(part.given),
            virtual_among(part.received),
            virtual_among(part.made),
        )
        stream = self.clock.stream(gpu, number)
        self._launching.before(stream, host, read, written)
        operands = self._launching.operands(name, read, host)
        self.clock.wait_stream(stream, current)
        self._accesses.check(name, read, written, stream, host)
        done = self.clock.joined(
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

    def wait_for(self, done: Done, gpu: VirtualGPU, by_host: bool = False) -> None:
        """The current stream of the GPU, or the host, goes on when a collective has ended.

        A compiled program ends before it: what the stream has got so far does not wait.
        """
        current, host = self.places.of("wait", gpu, note=False)
        if by_host:
            self.clock.host_waits([done.stream], done.operation, host)
        else:
            self.settle(current)
            self.clock.wait_done(current, done)

    def wait_for_last_write(self, tensor: VirtualTensor) -> None:
        """``wait_tensor``: the current stream goes on when the tensor has been written.

        It stands within compiled programs: chains go on across it.
        """
        done = self._accesses.last_write(tensor) if gpu_of(tensor) is not None else None
        if done is not None:
            current, _ = self.places.of("wait", tensor._gpu, note=False)
            self.clock.wait_done(current, done)

    def keep(self, work: object) -> None:
        """Let something live as long as the recording."""
        self._kept.append(work)

    def synchronize(self, streams: Sequence[StreamTime]) -> None:
        """The host goes on when all work given to the streams has ended."""
        for stream in streams:
            self.settle(stream)
        self.clock.host_waits(streams, "synchronize", self.clock.host())

    def has_ended(self, stream: StreamTime) -> bool:
        """The host asks whether all work given to the stream has ended."""
        self.settle(stream)
        return self.clock.ask_stream(stream)

    def settle(self, stream: StreamTime) -> None:
        """Before someone asks for all that the stream has been given: nothing stays put off."""
        self._launching.settle(stream)

    def end(self) -> tuple[float, float]:
        """Seconds until the host had ended, and until everything had."""
        self._launching.settle(None)
        return self.clock.end()

    @property
    def kept(self) -> frozenset[int]:
        """``Program.kept``; asked at the end."""
        return self._launching.kept


def _is_among(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def gpu_of(value: torch.Tensor) -> VirtualGPU | None:
    """The GPU of a tensor; None for one on the host."""
    gpu = getattr(value, "_gpu", None)
    return gpu if isinstance(gpu, VirtualGPU) else None
