"""``record()``, which records what happens on virtual GPUs in a block, and ``spend()``.

A recording is notified before and after every operation on values or shapes
(vgpu/tensor/tensor.py). It determines who issued the operation (host_threads.py), whether its
inputs are ready (races.py) and what it costs (costs.py), and appends one step to the program
(program.py). If the cost model sets ``fuses``, and in code compiled by torch.compile, elementwise
operations are deferred: their steps contain what a compiler pass needs (compiler_passes.py), namely
what each operation reads and when a result is needed in memory.

Operations on the CPU take no virtual time (``spend`` adds some).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from vgpu.collectives.table import Call
from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU, in_backward
from vgpu.tensor import copies
from vgpu.tensor.methods import virtual_among
from vgpu.tensor.results import Result, signature_of
from vgpu.tensor.tensor import Operation, VirtualTensor, block_of, set_observer
from vgpu.time.costs import CostModel
from vgpu.time.host_threads import (
    CallSites,
    HostThread,
    compiled_call,
    in_compiled_call,
    modules_tracked,
)
from vgpu.time.program import Enqueued, GrowingProgram, RecordedStream
from vgpu.time.races import Accesses, is_whole, poisoned, replaced
from vgpu.time.simulate import rarely_collected, simulate
from vgpu.time.steps import (
    UNKNOWN_OPERANDS,
    Copy,
    Deferred,
    Elements,
    Factors,
    GroupCollective,
    Kernel,
    LocalCollective,
    NeedResults,
    Operands,
    Read,
)
from vgpu.time.timeline import HOST, KINETO_DTYPES, Timeline
from vgpu.time.workloads import Workload, touched_bytes, work_of

assumed: dict[str, Any] = {}
"""Fields of CostModel that a virtual cluster sets for every recording."""

under_way: "Recording | None" = None


@contextmanager
def record(costs: CostModel | None = None, **changes: Any) -> Iterator[Timeline]:
    """Record what the block computes on virtual GPUs, and predict its times.

    ``costs`` is a cost model to use instead of the enabled GPU's. Its fields can be set by name,
    such as ``arithmetic_share=0.3`` or ``link="PCIe 4"``, as in ``replay``. The timeline is
    complete when the block ends. Times that the program queries before that
    (``event.elapsed_time``) ignore ``async_tp``. Raises RuntimeError inside another recording, or
    without virtual GPUs.
    """
    costs = (costs or CostModel(gpus.by_index(0).spec)).changed(assumed).changed(changes)
    devices = [gpus.by_index(index).device for index in range(gpus.device_count())]
    timeline = Timeline(costs.spec.name.removeprefix("Virtual "), devices)
    rank = dist.get_rank() if dist.is_initialized() else 0
    timeline.ranks = [rank]
    if under_way is not None:
        raise RuntimeError("a recording is already active: end its block before you start another")
    recording = Recording(costs, timeline, rank)
    with rarely_collected():
        try:
            with _switched_to(recording), modules_tracked(), _ranges_noted(recording.program):
                yield timeline
        finally:
            gpus.streams_of_nodes.clear()
            program = recording.program.end()
            program.races = [(r.device.index, replace(r, device=HOST)) for r in timeline.races]
            timed = simulate([program])
            timeline.programs, timeline.events = timed.programs, timed.events
            timeline.host_ranges = timed.host_ranges
            timeline.host_s, timeline.makespan_s = timed.host_s, timed.makespan_s


def spend(duration_s: float, name: str = "host work") -> None:
    """In a recording, keep the host busy for ``duration_s``, for example to simulate data loading.

    Traces show ``name``. Does nothing outside a recording.
    """
    if under_way is not None:
        under_way.program.spend(duration_s, name)


@contextmanager
def compiled() -> Iterator[None]:
    """In a recording, fuse the elementwise operations of the block, and those of its backward."""
    with compiled_call():
        yield
    if not in_compiled_call():
        end_compiled_code()


def end_compiled_code() -> None:
    """In a recording, let nothing that follows be fused with what's been called so far."""
    if under_way is not None:
        under_way.program.break_graph(None)


def sharing_the_interpreter(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``parallel_apply`` so that, in a recording, its threads share one interpreter."""

    @functools.wraps(parallel_apply)
    def applied(modules: Any, *args: Any, **kwargs: Any) -> Any:
        if under_way is None or len(modules) < 2:
            return parallel_apply(modules, *args, **kwargs)
        program = under_way.program
        program.threads.fork(program.host(), len(modules))
        try:
            return parallel_apply(modules, *args, **kwargs)
        finally:
            program.threads.join(program.host())

    return applied


@contextmanager
def _switched_to(recording: "Recording | None") -> Iterator[None]:
    """Make another recording, or none, the active one in the block, for all threads."""
    global under_way
    before = under_way
    under_way = recording
    set_observer(recording)
    try:
        yield
    finally:
        under_way = before
        set_observer(before)


@contextmanager
def _ranges_noted(program: GrowingProgram) -> Iterator[None]:
    """Record blocks of ``torch.profiler.record_function`` as ranges."""
    plain_enter, plain_exit = record_function.__enter__, record_function.__exit__
    entered: dict[int, int] = {}  # the thread in each block, by the block's id

    def enter(block: record_function) -> Any:
        entered[id(block)] = program.begin_range(block.name)
        return plain_enter(block)

    def leave(block: record_function, *error: Any) -> None:
        if id(block) in entered:  # a block may have been entered before the recording
            program.end_range(entered.pop(id(block)))
        plain_exit(block, *error)

    record_function.__enter__, record_function.__exit__ = enter, leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        record_function.__enter__, record_function.__exit__ = plain_enter, plain_exit  # type: ignore[method-assign]


def paused() -> Any:
    """Return a context manager that pauses recording for a block that's recorded as a unit."""
    return _switched_to(None)


class Recording:
    """One recording: turns operations, copies and collectives into steps (see ``Observer``)."""

    def __init__(self, costs: CostModel, timeline: Timeline, rank: int = 0) -> None:
        self.program = GrowingProgram(costs, rank)
        self.call_sites = CallSites(self.program)
        self.stream_numbers: dict[tuple[Any, ...], int] = {}  # of process groups
        self._accesses = Accesses(self.program, timeline)
        self._fuses = costs.fuses
        self._work: dict[tuple[Any, ...], Workload] = {}

    # Operations: called by run in vgpu/tensor/tensor.py

    def before(self, operation: Operation) -> None:
        """Determine the stream and thread; put garbage in place of inputs read too early."""
        info, inputs, written = operation.info, operation.inputs, operation.written
        if info.launches_nothing:
            self.call_sites.note(info.name, operation.gpu)
            return
        stream, host = self.call_sites.of(info.name, operation.gpu)
        operation.stream, operation.host = stream, host
        self._need_before(stream, host, inputs, written)
        late = self._accesses.check(info.name, inputs, written, stream, host)
        if late and not late[0]._inner.is_meta:
            operation.args, operation.kwargs = replaced(
                late, written, operation.args, operation.kwargs
            )

    def after(self, operation: Operation, outputs: Any, result: Result | None) -> None:
        """Record the operation as one step."""
        info, inputs, written = operation.info, operation.inputs, operation.written
        if info.launches_nothing:
            if info.allocates:
                stream, host = self.call_sites.of(info.name, operation.gpu)
                done = self.program.allocation(info.name, stream, host.by.backward)
                self._accesses.note_allocations(done, virtual_among((outputs,)))
            return
        stream, host = operation.stream, operation.host
        work = self._work_of(operation, outputs, result)
        fuses = info.fuses and not any(one._inner.is_complex() for one in inputs)
        done = self._launch(info.name, fuses, stream, host, info.read(inputs, written), work)
        self._accesses.note(done, inputs, written)
        if result is not None and result.alone is not None and not written:
            outputs._block.made = done  # what note_allocations does, for most shapes
        elif not (written and outputs is written[0]):  # an in-place operation returns its argument
            made = virtual_among((outputs,))
            new = [one for one in made if not any(one is other for other in written)]
            self._accesses.note_allocations(done, new)
        if (info.waits or info.indexes) and info.waits_for(operation.args):
            self.program.host_waits([stream], info.name, host)

    def _work_of(self, operation: Operation, outputs: Any, result: Result | None) -> Workload:
        """Return an operation's workload, cached by signature or, for shapes, in ``result``."""
        info, args, kwargs = operation.info, operation.args, operation.kwargs
        if result is not None:
            work: Workload | None = result.work
            if work is None:
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

    def record_stream(self, used: VirtualTensor, stream: torch.Stream) -> None:
        """Record ``used.record_stream(stream)``; do nothing for a shape on the host."""
        if gpu_of(used) is not None:
            self._accesses.record_stream(used, self.program.stream(used._gpu, stream.stream_id))

    def _launch(
        self,
        name: str,
        fuses: bool,
        stream: RecordedStream,
        host: HostThread,
        read: Sequence[VirtualTensor],
        work: Workload,
    ) -> Enqueued:
        """Launch one operation, or defer it; ``fuses`` says whether it can be fused with others."""
        if not (fuses and (self._fuses or host.compiled)):
            operands = self._operands(name, read, host)
            work = work.with_current_tf32()
            step = Kernel(name, host.by, stream.index, work, operands)
            return self.program.enqueue(step, stream)
        reads: list[Read] = []
        written_bytes = work.size_bytes
        for tensor in read:
            size_bytes = touched_bytes(tensor)
            written_bytes -= size_bytes
            if isinstance(tensor._gpu, VirtualGPU):
                write = self._accesses.last_write(tensor)
                writer = None if write is None else write.event
                offset = int(tensor._inner.storage_offset())
                reads.append(Read(writer, id(block_of(tensor)), offset, size_bytes))
        deferred = Deferred(name, host.by, stream.index, tuple(reads), written_bytes)
        return self.program.defer(deferred, stream)

    # Copies

    def before_copy(self, source: torch.Tensor) -> torch.Tensor:
        """Report races; return what to copy: ``source``, or garbage if it's read too early."""
        if not isinstance(source, VirtualTensor) or gpu_of(source) is None:
            return source
        stream, host = self.call_sites.of("copy", source._gpu, note=False)
        self._need_before(stream, host, [source], [])
        late = self._accesses.check("copy", [source], [], stream, host)
        return poisoned(source) if late and not source._inner.is_meta else source

    def after_copy(
        self, source: torch.Tensor, target: torch.Tensor, in_place: bool, waits: bool
    ) -> None:
        """Record a copy between two tensors, each on a GPU or on the host."""
        source_gpu, target_gpu = gpu_of(source), gpu_of(target)
        read = [source] if source_gpu and isinstance(source, VirtualTensor) else []
        written = [target] if target_gpu and isinstance(target, VirtualTensor) else []
        overwritten, made = (written, []) if in_place else ([], written)
        size_bytes = source.numel() * source.element_size()
        if source_gpu is target_gpu:
            if source_gpu is None:
                return
            stream, host = self._stream_to_write(source_gpu, overwritten)
            work = Workload(0, size_bytes + target.numel() * target.element_size())
            first = last = self._launch("copy", True, stream, host, read, work)
        else:
            here = there = None
            operands = self._operands("copy", read, self.program.host())
            if target_gpu is not None:
                there, host = self._stream_to_write(target_gpu, overwritten)
            if source_gpu is not None:
                here, host = self.call_sites.of("copy", source_gpu)
            streams = [stream for stream in (here, there) if stream is not None]
            here_index, there_index = (end.index if end else None for end in (here, there))
            step = Copy(host.by, size_bytes, here_index, there_index, operands)
            done = self.program.enqueue_together(step, streams)
            first, last = done[0], done[-1]
            between = source_gpu is not None and target_gpu is not None
            pinned = source_gpu is not None or copies.is_cpu_pinned(source)
            if not between and (waits or not pinned):
                self.program.host_waits(streams, "copy", host)
            if between and target_gpu is not None and in_backward():
                # The next node runs in the thread of the target's device.
                engine = self.program.threads.engine(target_gpu.index)
                self.program.join_threads(engine, [host])
        self._accesses.note(first, read, [])
        self._accesses.note(last, [], overwritten)
        self._accesses.note_allocations(last, made)

    def _stream_to_write(
        self, gpu: VirtualGPU, overwritten: Sequence[VirtualTensor]
    ) -> tuple[RecordedStream, HostThread]:
        """Return the stream and the thread of a copy that overwrites these tensors."""
        stream, host = self.call_sites.of("copy", gpu)
        self._need_before(stream, host, [], overwritten)
        self._accesses.check("copy", [], overwritten, stream, host)
        return stream, host

    # Collectives

    def local_collective(self, name: str, size_bytes: int, gpus: Sequence[VirtualGPU]) -> None:
        """Record a collective among GPUs of this process, on their current streams."""
        sites = [self.call_sites.of(name, gpu, note=False) for gpu in gpus]
        streams, by = [stream for stream, _ in sites], sites[0][1].by
        for stream in streams:
            self.program.break_graph(stream)
        indices = tuple(stream.index for stream in streams)
        self.program.enqueue_together(LocalCollective(name, by, indices, size_bytes), streams)

    def group_collective(self, call: Call, gpu: VirtualGPU, number: int) -> Enqueued:
        """Record this rank's side of a collective, on its process group's stream ``number``.

        That stream waits for the current one, as NCCL's does.
        """
        name = call.name
        current, host = self.call_sites.of(name, gpu, note=False)
        read, written, made = map(virtual_among, (call.inputs, call.outputs, call.made))
        stream = self.program.stream(gpu, number)
        self._need_before(stream, host, read, written)
        operands = self._operands(name, read, host)
        self.program.wait_enqueued(stream, current)
        self._accesses.check(name, read, written, stream, host)
        step = GroupCollective(
            name,
            host.by,
            stream.index,
            call.size_bytes,
            tuple(call.ranks),
            call.group_name,
            current.index,
            operands,
            _elements_of(call, made),
        )
        done = self.program.enqueue(step, stream)._replace(clock=dict(stream.clock))
        self._accesses.note(done, read, [*written, *made])
        for used in (*read, *written, *made):  # ProcessGroupNCCL keeps them until it has finished
            self._accesses.record_stream(used, stream)
        return done

    def wait_for(self, done: Enqueued, gpu: VirtualGPU, by_host: bool = False) -> None:
        """Make the current stream of the GPU, or the host, wait for a collective.

        The wait ends a compiled program: what's already enqueued on the stream doesn't wait.
        """
        current, host = self.call_sites.of("wait", gpu, note=False)
        if by_host:
            self.program.host_waits([done.stream], done.operation, host)
        else:
            self.program.break_graph(current)
            self.program.wait_operation(current, done)

    def wait_for_last_write(self, tensor: VirtualTensor) -> None:
        """Make the current stream wait until the tensor has been written, for ``wait_tensor``.

        Compiled programs contain ``wait_tensor``, so operations are fused across it.
        """
        done = self._accesses.last_write(tensor) if gpu_of(tensor) is not None else None
        if done is not None:
            current, _ = self.call_sites.of("wait", tensor._gpu, note=False)
            self.program.wait_operation(current, done)

    # Fused elementwise operations

    def _need_before(
        self,
        stream: RecordedStream,
        host: HostThread,
        read: Sequence[VirtualTensor],
        written: Sequence[VirtualTensor],
    ) -> None:
        """Materialize deferred results with which an operation on ``stream`` can't be fused."""
        if not self.program.has_deferred:
            return
        if self.program.several_streams:  # nothing fuses across streams
            writes = self._writes_of(_on_gpus((*read, *written)))
            self._need([write for write in writes if write and write.stream is not stream], host)
        if written:  # deferred results elsewhere in the written blocks must not be lost
            parts = [part for part in _on_gpus(written) if not is_whole(part)]
            self._need(self._writes_of(parts), host)

    def _operands(self, name: str, read: Sequence[VirtualTensor], host: HostThread) -> Operands:
        """Return what an operation reads and so needs in memory; ``name`` identifies matmuls."""
        if not self.program.has_deferred:
            return UNKNOWN_OPERANDS
        on_gpus = _on_gpus(read)
        writes = self._writes_of(on_gpus)
        self._need(writes, host)
        writers = [None if write is None else write.event for write in writes]
        factors = None
        # These have no out= argument; a float8 matmul also has two scales.
        if (name, len(on_gpus)) in (("mm", 2), ("_scaled_mm", 4)):
            left, right, *_ = on_gpus
            if left.layout is torch.strided and left.stride(1) == 1:
                factors = Factors(writers[0], touched_bytes(left), touched_bytes(right))
        return Operands(tuple(w for w in writers if w is not None), factors=factors)

    def _writes_of(self, tensors: Iterable[VirtualTensor]) -> list[Enqueued | None]:
        return [self._accesses.last_write(tensor) for tensor in tensors]

    def _need(self, writes: Iterable[Enqueued | None], host: HostThread) -> None:
        events: list[int] = []
        for write in writes:
            if write is not None and write.deferred is not None and not write.deferred.is_needed:
                write.deferred.is_needed = True
                events.append(write.deferred.event)
        if events:
            self.program.steps.append(NeedResults(tuple(events), host.by))


def _elements_of(call: Call, made: Sequence[torch.Tensor]) -> Elements:
    """Count the elements that this rank passes to a collective and gets from it."""
    sent, received = call.inputs, [*call.outputs, *made]
    dtypes = [tensor.dtype for tensor in (*sent, *received)]
    dtype = KINETO_DTYPES.get(dtypes[0], str(dtypes[0])) if dtypes else ""
    return Elements(dtype, _numel(sent), _numel(received))


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _on_gpus(tensors: Iterable[VirtualTensor]) -> list[VirtualTensor]:
    """Return the tensors on a GPU, without those on the host, such as scalars."""
    return [tensor for tensor in tensors if isinstance(tensor._gpu, VirtualGPU)]


def gpu_of(value: torch.Tensor) -> VirtualGPU | None:
    """Return the GPU of a tensor; None for a tensor on the host."""
    gpu = getattr(value, "_gpu", None)
    return gpu if isinstance(gpu, VirtualGPU) else None
