"""A record of what was allocated and released when, and what CUDA would reserve for it."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from vgpu.memory.caching_allocator import CachingAllocator


class Memory(Protocol):
    """What a record asks of the memory of a GPU."""

    device: torch.device
    capacity_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class MemoryEvent:
    """One allocation (size above zero) or release (below zero) on one device.

    A storage that grows or shrinks in place changes the size of its block, in one event.
    """

    device: torch.device
    size_bytes: int
    allocated_bytes: int  # on this device, after the event
    operation: str  # for a release: the operation that had allocated the block
    block: int  # a number that the events of one block share
    block_bytes: int  # what the block has after the event
    stream: int | None  # where the block was allocated; None for one from before the record
    label: str = ""  # of an allocation: what the record's ``label`` answered


@dataclass(frozen=True)
class Reserved:
    """What CUDA's caching allocator makes of the events of one device.

    The names are those of ``torch.cuda``: ``peak_reserved_bytes`` is what its
    ``max_memory_reserved()`` gives. Where a block is not worth splitting, allocated counts all of
    it, up to 1 MiB more than was asked for.
    """

    reserved_bytes: int  # in the end
    peak_reserved_bytes: int
    allocated_bytes: int  # in the end
    peak_allocated_bytes: int
    segments: int  # in the end
    retries: int  # how often cached segments had to be given back for want of memory

    @property
    def lost_bytes(self) -> int:
        """What was reserved at the peak over what was ever allocated at once.

        Lost to fragmentation, to the size of segments, and to streams, which share nothing.
        """
        return self.peak_reserved_bytes - self.peak_allocated_bytes


class MemoryRecord:
    """The events of a ``record_memory`` block, in order."""

    def __init__(
        self,
        memories: Iterable[Memory],
        label: Callable[[], str] | None = None,
        depth: int = 0,
    ) -> None:
        """memories: of all GPUs that there are. label: as of ``record_memory``.

        depth: of the host where the record begins; those within it may have events too.
        """
        self.events: list[MemoryEvent] = []
        self.depth = depth
        self._label = label
        # What GPUs hold before the record. Those of a cluster are named like those around it.
        self._held: dict[torch.device, dict[Memory, int]] = {}
        self._capacity_bytes: dict[torch.device, int] = {}
        for memory in memories:
            self._capacity_bytes[memory.device] = memory.capacity_bytes
            if memory.allocated_bytes:
                self._held[memory.device] = {memory: memory.allocated_bytes}
        self._numbers = itertools.count()
        self._live: dict[int, tuple[int, int | None]] = {}  # id of a block → its number and stream

    def allocated_bytes(self, device: torch.device | str) -> list[int]:
        """Bytes on ``device`` after each of its events."""
        return [event.allocated_bytes for event in self.events_on(device)]

    def bytes_before(self, device: torch.device | str) -> int:
        """What lay on ``device`` when the record began."""
        return sum(self._held.get(torch.device(device), {}).values())

    def peak_bytes(self, device: torch.device | str) -> int:
        """The most that ``device`` held during the record; 0 where nothing happened there."""
        return max(self.allocated_bytes(device), default=0)

    def reserved(
        self,
        device: torch.device | str,
        expandable_segments: bool = False,
        capacity_bytes: int | None = None,
    ) -> Reserved:
        """What CUDA's caching allocator would reserve on ``device`` for the same events.

        expandable_segments: as in ``PYTORCH_CUDA_ALLOC_CONF``. capacity_bytes: what the GPU has, in
        place of the virtual one's. OutOfMemoryError where the allocator would find no room.

        Blocks from before the record lie where they would if they had been allocated first, those
        that are never released as one: begin the record before the model is made.
        """
        events = self.events_on(device)
        wanted = torch.device(device)
        if capacity_bytes is None:
            capacity_bytes = self._capacity_bytes.get(wanted, 0)
        allocator = CachingAllocator(wanted, capacity_bytes, expandable_segments)
        _allocate_older(events, self.bytes_before(wanted), allocator)
        for event in events:
            before_bytes = event.block_bytes - event.size_bytes
            if event.block_bytes == 0:
                allocator.free(event.block)
            elif before_bytes == 0:
                allocator.allocate(event.block, event.block_bytes, event.stream or 0)
            else:
                allocator.resize(event.block, event.block_bytes, event.stream or 0)
        return Reserved(
            reserved_bytes=allocator.reserved_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            allocated_bytes=allocator.allocated_bytes,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            segments=allocator.segments,
            retries=allocator.retries,
        )

    def note(
        self,
        memory: Memory,
        block: object,
        size_bytes: int,
        block_bytes: int,
        current_stream: int,
        operation: str,
    ) -> None:
        """Add the event of a change by ``size_bytes``; ``block`` may be a dying object."""
        number, stream = self._live.pop(id(block), (None, None))
        if number is None:
            number = next(self._numbers)
        device, allocated_bytes = memory.device, memory.allocated_bytes
        if block_bytes:
            stream = current_stream
            self._live[id(block)] = number, stream
        self._capacity_bytes[device] = memory.capacity_bytes
        self._held.setdefault(device, {}).setdefault(memory, allocated_bytes - size_bytes)
        label = self._label() if self._label is not None and size_bytes > 0 else ""
        self.events.append(
            MemoryEvent(
                device, size_bytes, allocated_bytes, operation, number, block_bytes, stream, label
            )
        )

    def number_of(self, block: object) -> int:
        """The number that events of a block with bytes have, or will have."""
        if id(block) not in self._live:
            self._live[id(block)] = next(self._numbers), None
        return self._live[id(block)][0]

    def events_on(self, device: torch.device | str) -> list[MemoryEvent]:
        """Those of ``device``; ValueError where that names a GPU of a cluster and another."""
        wanted = torch.device(device)
        if len(self._held.get(wanted, {})) > 1:
            raise ValueError(
                f"{wanted} is more than one GPU in this record: one of its own host, or of a "
                "vgpu.cluster, and one of another cluster. Begin the record in the cluster's block"
            )
        return [event for event in self.events if event.device == wanted]


def _allocate_older(
    events: list[MemoryEvent], held_bytes: int, allocator: CachingAllocator
) -> None:
    """Allocate what was there before the first event, on the default stream."""
    older: dict[int, int] = {}  # block → bytes
    seen = set()
    for event in events:
        if event.block not in seen and event.block_bytes != event.size_bytes:
            older[event.block] = event.block_bytes - event.size_bytes
        seen.add(event.block)
    if never_released_bytes := held_bytes - sum(older.values()):
        allocator.allocate(_NEVER_RELEASED, never_released_bytes, 0)
    for block, size_bytes in older.items():
        allocator.allocate(block, size_bytes, 0)


_NEVER_RELEASED = -2  # beside the numbers of blocks
