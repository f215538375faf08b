"""One recording of virtual time, and which one is under way.

A recording sees every operation that runs on a virtual GPU, with values (``run``) or as shapes
only (``operation``, ``copied``). call_sites.py says who issues it: which stream, which thread of the
host, which module, in which pass. The recorder then gets one step.

Left out: operations on the CPU take no virtual time (``spend`` adds some).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from vgpu.memory.gpus import VirtualGPU, in_backward
from vgpu.tensor import handlers, operations
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time import signatures
from vgpu.time.call_sites import CallSites
from vgpu.time.costs import CostModel, Workload, work_of
from vgpu.time.happens_before import Enqueued, RecordedStream
from vgpu.time.launching import Launching
from vgpu.time.races import Accesses, poisoned, replaced
from vgpu.time.recorder import Recorder
from vgpu.time.timeline import Timeline
from vgpu.time.traits import Traits, traits_of

under_way: "Recording | None" = None

Taken = Callable[["Recording", Operator, Args, Kwargs], Any]
_handlers: dict[str, Taken] = {}


def use_handlers(handlers: Mapping[str, Taken]) -> None:
    """Let each of ``handlers`` run and record the operator whose name is its key, with values."""
    _handlers.update(handlers)


@contextmanager
def begun(recording: "Recording") -> Iterator[None]:
    """The recording is under way in the block, in all threads; RuntimeError inside another."""
    if under_way is not None:
        raise RuntimeError("a recording is under way already: end its block before the next one")
    _put_under_way(recording)
    try:
        yield
    finally:
        _put_under_way(None)


@contextmanager
def paused() -> Iterator[None]:
    """What happens in the block is not recorded, because the caller records it as a whole."""
    recording = under_way
    _put_under_way(None)
    try:
        yield
    finally:
        _put_under_way(recording)


def _put_under_way(recording: "Recording | None") -> None:
    global under_way
    under_way = recording
    operations.set_interceptor(None if recording is None else recording.run)


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

    # Tensors with values

    def run(self, func: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Compute ``func`` with values, and record it."""
        traits = traits_of(func)
        taken = _handlers.get(traits.schema_name)
        if taken is not None:
            return taken(self, func, args, kwargs)
        if traits.copies:
            return self._run_copy(func, args, kwargs)
        inputs = _virtual((*args, *kwargs.values()))
        if traits.free:
            return self._run_free(func, traits, inputs, args, kwargs)
        written = _virtual(traits.written(args, kwargs)) if traits.writes else []
        if inputs:
            stream, host = self.call_sites.of(traits.name, inputs[0]._gpu)
            self._launching.before(stream, host, inputs, written)
            late = self._accesses.check(traits.name, inputs, written, stream, host)
            if late:
                args, kwargs = replaced(late, written, args, kwargs)
        result = operations.run(func, args, kwargs)
        outputs = _virtual((result,))
        if not inputs:
            if not outputs:
                return result  # a factory of another device
            stream, host = self.call_sites.of(traits.name, outputs[0]._gpu)
        work = self._work_of(func, args, kwargs, result)
        done = self._launching.kernel(traits.name, traits.fuses, stream, host, inputs, work)
        self._accesses.note(done, inputs, written)
        if written:  # an in-place operation gives back what it was given
            outputs = [out for out in outputs if not any(out is given for given in written)]
        self._accesses.note_allocations(done, outputs)
        if traits.waits_for(args):
            self.recorder.host_waits([stream], traits.name, host)
        return result

    def _run_free(
        self,
        func: Operator,
        traits: Traits,
        inputs: Sequence[VirtualTensor],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """An operator that launches nothing."""
        if inputs:
            self.call_sites.note(traits.name, inputs[0]._gpu)
        if traits.records_stream:
            self.record_stream(*args)
        result = operations.run(func, args, kwargs)
        if traits.allocates:
            for made in _virtual((result,)):
                self._accesses.note_allocations(self._allocation(traits.name, made._gpu), [made])
        return result

    def _work_of(self, func: Operator, args: Args, kwargs: Kwargs, result: Any) -> Workload:
        try:
            key = signatures.signature(func, args, kwargs)
        except NotImplementedError:  # sparse
            return work_of(func, args, kwargs, result)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = work_of(func, args, kwargs, result)
        return work

    def _run_copy(self, func: Operator, args: Args, kwargs: Kwargs) -> Any:
        """``_to_copy`` and ``copy_``: the operators that may cross devices."""
        into = args[0] if len(args) > 1 else None
        source = args[-1] if into is None else args[1]
        late = self.check_source(source)
        if late and into is None:
            args = (poisoned(source), *args[1:])
        elif late:
            args = (into, poisoned(source), *args[2:])
        result = operations.run(func, args, kwargs)
        waits = not (kwargs.get("non_blocking") or (into is not None and args[2:3] == (True,)))
        self.copied(source, result, into is not None, waits)
        return result

    # What happened; tensors may be only shapes

    def operation(
        self,
        traits: Traits,
        gpu: VirtualGPU,
        inputs: Sequence[VirtualTensor],
        written: Sequence[VirtualTensor],
        work: Workload,
        waits: bool,
    ) -> Enqueued | None:
        """Record one operation on shapes; returns by what its results are made, if any are.

        waits: whether the host needs a value before it can go on.
        """
        if traits.free:
            self.call_sites.note(traits.name, gpu)
            return self._allocation(traits.name, gpu) if traits.allocates else None
        stream, host = self.call_sites.of(traits.name, gpu)
        self._launching.before(stream, host, inputs, written)
        self._accesses.check(traits.name, inputs, written, stream, host)
        done = self._launching.kernel(traits.name, traits.fuses, stream, host, inputs, work)
        self._accesses.note(done, inputs, written)
        if waits:
            self.recorder.host_waits([stream], traits.name, host)
        return done

    def _allocation(self, name: str, gpu: VirtualGPU) -> Enqueued:
        stream, host = self.call_sites.of(name, gpu)
        return self.recorder.allocation(name, stream, host.backward)

    def record_stream(self, used: VirtualTensor, stream: torch.Stream) -> None:
        """``used.record_stream(stream)``; nothing to do for a shape on the host."""
        if gpu_of(used) is not None:
            time = self.recorder.stream(used._gpu, stream.stream_id)
            self._accesses.record_stream(used, time)

    def check_source(self, source: torch.Tensor) -> list[VirtualTensor]:
        """Before a copy: ``source`` in a list if it is not written yet; a race is noted."""
        if not isinstance(source, VirtualTensor) or gpu_of(source) is None:
            return []
        stream, host = self.call_sites.of("copy", source._gpu, note=False)
        self._launching.before(stream, host, [source], [])
        return self._accesses.check("copy", [source], [], stream, host)

    def copied(
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
        pinned = source_gpu is not None or handlers.is_cpu_pinned(source)
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
        read, written, made = _virtual(part.inputs), _virtual(part.outputs), _virtual(part.made)
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


def gpu_of(value: torch.Tensor) -> VirtualGPU | None:
    """The GPU of a tensor; None for one on the host."""
    gpu = getattr(value, "_gpu", None)
    return gpu if isinstance(gpu, VirtualGPU) else None


def _virtual(values: Iterable[Any]) -> list[VirtualTensor]:
    """The virtual tensors among values and in their lists and tuples."""
    found: list[VirtualTensor] = []
    for value in values:
        if isinstance(value, VirtualTensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _virtual(value)
    return found
