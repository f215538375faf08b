"""Races: a stream uses memory that another stream has written or read, without waiting for it.

On CUDA, a missing wait sometimes yields correct values and sometimes garbage. Here it's always
reported, regardless of the times: vector clocks determine what happens before what (program.py). If
a value is read, according to the times, before it has been written, the reader gets NaN (or the
smallest value of a dtype without NaN).

Virtual GPUs never reuse a block, but CUDA's caching allocator reuses a freed one, on the stream on
which it was allocated. So two more kinds of races are reported, although the values are correct: a
block that is freed while another stream may still use it, without ``record_stream``; and a stream
that uses new memory without waiting for the stream on which it was allocated.

Three kinds aren't detected: races with allocations, writes or reads from before the recording; a
host that reads a copy's result before the copy has finished; and a backward hook that switches to a
stream that doesn't wait for the gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vgpu.memory import blocks as memory
from vgpu.memory.blocks import Block
from vgpu.memory.gpus import in_backward
from vgpu.tensor import tensor
from vgpu.tensor.operators import Args, Kwargs
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time.host_threads import HostThread, current_module
from vgpu.time.program import Enqueued, GrowingProgram, RecordedStream
from vgpu.time.timeline import FreedInUse, Race, Timeline
from vgpu.time.workloads import touched_bytes


class Uses:
    """The uses of a block of memory since it was allocated, in recordings of virtual time."""

    __slots__ = ("accesses", "reads", "recorded", "write")

    def __init__(self) -> None:
        self.write: Enqueued | None = None  # the last write
        self.reads: dict[RecordedStream, Enqueued] = {}  # each stream's last read since that write
        self.recorded: set[RecordedStream] = set()  # streams passed to record_stream
        self.accesses: Accesses | None = None  # set if a race is possible when the block is freed

    @staticmethod
    def of(block: Block) -> "Uses":
        if block.uses is None:
            block.uses = Uses()
        uses: Uses = block.uses
        return uses

    def freed(self, allocation: Enqueued) -> None:
        """Note which uses may still be unfinished now that the block is freed.

        ``allocation`` is the operation for which the block was allocated.
        """
        if self.accesses is None:
            return
        last = self.write or allocation
        for use in (last, *self.reads.values()):
            # Autograd itself records the streams that read a gradient.
            gradient = allocation.backward and use.backward
            other = use.stream is not allocation.stream and use.stream not in self.recorded
            if other and not gradient:
                writer = last if last.stream is allocation.stream else allocation
                self.accesses.freed_in_use.append((_without_result(writer), _without_result(use)))


class Accesses:
    """The memory accesses in one recording, and the races among them."""

    def __init__(self, program: GrowingProgram, timeline: Timeline) -> None:
        self._program = program
        self._timeline = timeline
        # For each block freed since the last operation: a write on its own stream, and a use on
        # another.
        self.freed_in_use: list[tuple[Enqueued, Enqueued]] = []

    def check(
        self,
        name: str,
        read: Iterable[VirtualTensor],
        written: Iterable[VirtualTensor],
        stream: RecordedStream,
        host: HostThread,
    ) -> list[VirtualTensor]:
        """Report races of the next operation on ``stream``.

        In a backward pass, the autograd engine makes streams wait instead. Returns the tensors that
        haven't been written yet when the operation starts.
        """
        late: list[VirtualTensor] = []
        if not self._program.several_streams:
            return late
        if self.freed_in_use and not host.by.backward:
            self._check_freed(stream)
        for used in read:
            write = _last_write(tensor.block_of(used))
            if write is None or write.stream is stream:
                continue
            if self._races(name, stream, write):
                written_s = self._program.time_s(write.event)
                if written_s > self._program.ready_s(stream, host):
                    late.append(used)
        for used in written:
            block = tensor.block_of(used)
            reads = () if block.uses is None else block.uses.reads.values()
            for before in (_last_write(block), *reads):
                if before is not None and before.stream is not stream:
                    self._races(name, stream, before)
        return late

    def _races(self, name: str, stream: RecordedStream, before: Enqueued) -> bool:
        """Report a race if the stream's next operation may start before ``before`` has finished.

        Returns whether there's a race. In a backward pass, the stream waits instead.
        """
        if not self._is_of_this(before) or self._program.happens_before(before, stream):
            return False
        if in_backward():
            self._program.break_graph(stream)
            self._program.break_graph(before.stream)
            self._program.wait_operation(stream, before)
            return False
        other, module = before.stream.number, current_module()
        self._report(Race(name, stream.device, stream.number, before.operation, other, module))
        return True

    def _report(self, race: Race) -> None:
        if race not in self._timeline.races:
            self._timeline.races.append(race)

    def note(
        self,
        operation: Enqueued,
        read: Iterable[VirtualTensor],
        written: Iterable[VirtualTensor],
    ) -> None:
        """Record what an operation has read and written."""
        reading = _without_result(operation)
        for used in read:  # even if there's only one stream so far: another may write to it later
            block = tensor.block_of(used)
            reads = Uses.of(block).reads
            if reads and next(iter(reads)).recording is not self._program.recording:
                reads.clear()
            reads[operation.stream] = reading
            self._watch(block, operation)
        for used in written:
            block = tensor.block_of(used)
            uses = Uses.of(block)
            uses.write = operation
            uses.reads.clear()
            if block.made is not None and is_whole(used):
                block.made = _without_result(block.made)  # overwritten
            self._watch(block, operation)

    def note_allocations(self, operation: Enqueued, results: Iterable[VirtualTensor]) -> None:
        """Record the operation for which new tensors were allocated."""
        for result in results:
            tensor.block_of(result).made = operation

    def _watch(self, block: Block, operation: Enqueued) -> None:
        """Have a block checked when it's freed, if a stream other than its own has used it."""
        if block.made is not None and block.made.stream is not operation.stream:
            Uses.of(block).accesses = self

    def record_stream(self, used: VirtualTensor, stream: RecordedStream) -> None:
        """Record ``Tensor.record_stream``: the stream's current work delays reuse of the block."""
        Uses.of(tensor.block_of(used)).recorded.add(stream)

    def last_write(self, tensor_: VirtualTensor) -> Enqueued | None:
        """Return the last write to the tensor in this recording."""
        write = _last_write(tensor.block_of(tensor_))
        return write if write is not None and self._is_of_this(write) else None

    def _is_of_this(self, operation: Enqueued) -> bool:
        return operation.stream.recording is self._program.recording

    def _check_freed(self, stream: RecordedStream) -> None:
        """Check whether the stream has waited for the streams that used its freed blocks.

        This is called just before the stream's next operation, which may get one of these blocks.
        Waiting that late is safe, and it's what the backward pass and FSDP do.
        """
        freed, self.freed_in_use = self.freed_in_use, []
        for writer, use in freed:
            if writer.stream is not stream:
                if self._is_of_this(writer):
                    self.freed_in_use.append((writer, use))
                continue
            if self._is_of_this(use) and not self._program.happens_before(use, stream):
                name, other = writer.operation, use.stream.number
                self._report(FreedInUse(name, stream.device, stream.number, use.operation, other))


def is_whole(part: VirtualTensor) -> bool:
    """Whether a tensor fills its block."""
    return memory.rounded(touched_bytes(part)) >= tensor.block_of(part).size_bytes


def _without_result(operation: Enqueued) -> Enqueued:
    """Return the operation without its deferred result, which must not outlive its blocks."""
    return operation if operation.deferred is None else operation._replace(deferred=None)


def _last_write(block: Block) -> Enqueued | None:
    """Return the last recorded write to the block, or else its allocation, if that was recorded."""
    written: Enqueued | None = None if block.uses is None else block.uses.write
    return written or block.made


def poisoned(value: VirtualTensor) -> VirtualTensor:
    """Return a tensor like ``value`` that holds garbage."""
    garbage = torch.empty_like(value._inner)
    _fill(garbage)
    return tensor.wrap(garbage, value._gpu, "garbage")


def replaced(
    late: Sequence[VirtualTensor], written: Sequence[torch.Tensor], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Return the arguments, with garbage in place of the ``late`` tensors.

    A tensor that will be written in place is itself overwritten with garbage.
    """
    substitutes = {}
    for value in late:
        if any(value is other for other in written):
            _fill(value._inner)
        else:
            substitutes[id(value)] = poisoned(value)

    def swap(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([swap(item) for item in value])
        return substitutes.get(id(value), value)

    return swap(args), {name: swap(value) for name, value in kwargs.items()}


def _fill(values: torch.Tensor) -> None:
    if values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    elif values.dtype is not torch.bool:
        values.fill_(torch.iinfo(values.dtype).min)
