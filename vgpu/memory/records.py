"""Record allocations and frees, and compute how much CUDA's caching allocator would reserve.

``vgpu.record_memory`` yields a ``MemoryRecord``. ``Reserve`` is behind
``torch.vgpu.memory_reserved`` and similar functions. Simulating the allocator takes longer than
logging, so allocations are logged, in 8 bytes each, and the allocator processes the log when it's
queried or when the log gets long.

Besides what caching_allocator.py leaves out, ``Reserve`` differs from CUDA's allocator in two ways.
Outside a recording, it assumes that a backward pass allocates on the default stream. And if
fragmentation leaves no room, CUDA's allocator fails, whereas a virtual GPU exceeds its capacity.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vgpu.memory.caching_allocator import CachingAllocator

if TYPE_CHECKING:  # blocks.py imports this file
    from vgpu.memory.blocks import DeviceMemory


@dataclass(frozen=True)
class MemoryEvent:
    """One allocation (positive size) or free (negative size) on one device.

    Resizing a storage in place changes its block's size in a single event.
    """

    device: torch.device
    size_bytes: int
    allocated_bytes: int  # on this device, after the event
    operation: str  # for a free, the operation that allocated the block
    block: int  # a number, the same for all events of one block
    block_bytes: int  # the size of the block after the event
    stream: int | None  # on which the block was allocated; None if before the record
    label: str = ""  # for an allocation, the result of the record's ``label``


class MemoryRecord:
    """The events of a ``record_memory`` block, in order."""

    def __init__(
        self,
        memories: "Iterable[DeviceMemory]",
        label: Callable[[], str] | None = None,
        depth: int = 0,
    ) -> None:
        """``memories`` has every GPU's memory; ``label`` is as in ``record_memory``.

        ``depth`` is the depth of the host where the record starts; hosts nested in it may have
        events, too.
        """
        self.events: list[MemoryEvent] = []
        self.depth = depth
        self._label = label
        # The bytes allocated before the record, per device and memory: a cluster's GPUs have the
        # same names as those outside it.
        self._held: dict[torch.device, dict[DeviceMemory, int]] = {}
        self._capacity_bytes: dict[torch.device, int] = {}
        for memory in memories:
            self._capacity_bytes[memory.device] = memory.capacity_bytes
            if memory.allocated_bytes:
                self._held[memory.device] = {memory: memory.allocated_bytes}
        self._numbers = itertools.count()
        self._live: dict[int, tuple[int, int | None]] = {}  # id of a block → its number and stream

    def allocated_bytes(self, device: torch.device | str) -> list[int]:
        """Return the bytes allocated on ``device`` after each of its events."""
        return [event.allocated_bytes for event in self.events_on(device)]

    def bytes_before(self, device: torch.device | str) -> int:
        """Return the bytes allocated on ``device`` when the record started."""
        return sum(self._held.get(torch.device(device), {}).values())

    def peak_bytes(self, device: torch.device | str) -> int:
        """Return the peak bytes allocated on ``device`` during the record, or 0 without events."""
        return max(self.allocated_bytes(device), default=0)

    def reserved(
        self,
        device: torch.device | str,
        expandable_segments: bool = False,
        capacity_bytes: int | None = None,
    ) -> CachingAllocator:
        """Return CUDA's caching allocator after the same events on ``device``.

        Its ``peak_reserved_bytes`` is what ``torch.cuda.max_memory_reserved()`` would be.
        ``expandable_segments`` is as in ``PYTORCH_CUDA_ALLOC_CONF``; ``capacity_bytes`` overrides
        the virtual GPU's capacity. Raises OutOfMemoryError if the allocator would run out of
        memory.

        Blocks allocated before the record are placed first, and those without an event in it as a
        single block. So start recording before you create the model.
        """
        wanted = torch.device(device)
        if capacity_bytes is None:
            capacity_bytes = self._capacity_bytes.get(wanted, 0)
        allocator = CachingAllocator(wanted, capacity_bytes, expandable_segments)
        for _ in self.replay(allocator):
            pass
        return allocator

    def replay(self, allocator: CachingAllocator) -> Iterator[MemoryEvent]:
        """Replay the events of the allocator's device on it, and yield each event afterwards."""
        events = self.events_on(allocator.device)
        _allocate_older(events, self.bytes_before(allocator.device), allocator)
        for event in events:
            if event.block_bytes == 0:
                allocator.free(event.block)
            elif event.block_bytes == event.size_bytes:
                allocator.allocate(event.block, event.block_bytes, event.stream or 0)
            else:
                allocator.resize(event.block, event.block_bytes, event.stream or 0)
            yield event

    def add(
        self,
        memory: "DeviceMemory",
        block: object,
        size_bytes: int,
        block_bytes: int,
        current_stream: int,
        operation: str,
    ) -> None:
        """Add an event for a change of ``size_bytes``; ``block`` may be a dying object."""
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
        """Return the number that a nonempty block's events have, or will have."""
        if id(block) not in self._live:
            self._live[id(block)] = next(self._numbers), None
        return self._live[id(block)][0]

    def events_on(self, device: torch.device | str) -> list[MemoryEvent]:
        """Return the events on ``device``.

        Raises ValueError if that's the name of both a cluster's GPU and another GPU.
        """
        wanted = torch.device(device)
        if len(self._held.get(wanted, {})) > 1:
            raise ValueError(
                f"{wanted} is more than one GPU in this record: one in a vgpu.cluster block, and "
                "one outside it or in another such block. Start the record inside the block"
            )
        return [event for event in self.events if event.device == wanted]


def _allocate_older(
    events: list[MemoryEvent], held_bytes: int, allocator: CachingAllocator
) -> None:
    """On the default stream, allocate what had been allocated before the first event."""
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


_NEVER_RELEASED = -2  # a key that can't be a block number, since those start at 0


# A nonnegative log entry is a new block: its bytes and stream. A negative entry is _FREE minus a
# block's number, or one of the other codes; _RESIZE is followed by the block's number, and then by
# its bytes and stream.
_RESET_PEAK, _EMPTY_CACHE, _RESIZE, _FORGET_RETRIES, _FREE = -1, -2, -3, -4, -5
_LONGEST_LOG = 2**21  # 16 MiB; the allocator takes a few seconds to process it
_STREAM_BITS = 11  # sizes are multiples of 2^9 bytes, so 11 more bits leave 20 for the stream
_STREAM_MASK = 2**20 - 1


class Reserve:
    """The segments that CUDA's caching allocator would have on one GPU."""

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self._allocator = CachingAllocator(device, capacity_bytes, may_exceed_capacity=True)
        # A finalizer may append an entry at any time, so entries that belong together are added in
        # one call.
        self._log = array("q")
        self._append = self._log.append
        self._logged_blocks = self._applied_blocks = 0
        self._is_applying = False

    def new(self, block_bytes: int, stream: int) -> int:
        """Log a new block of ``block_bytes``, a multiple of 512, possibly 0; return its number."""
        packed = block_bytes << _STREAM_BITS | stream & _STREAM_MASK
        number = self._logged_blocks = self._logged_blocks + 1
        self._append(packed)  # in the order of block numbers, so entries don't store them
        if len(self._log) > _LONGEST_LOG:
            self._shorten_log()
        return number

    def resized(self, block: int, block_bytes: int, stream: int) -> None:
        """Log that the block with this number now has ``block_bytes``, possibly 0."""
        packed = block_bytes << _STREAM_BITS | stream & _STREAM_MASK
        self._log.extend((_RESIZE, block, packed))

    def freed(self, block: int) -> None:
        """Log that the block with this number, which wasn't empty, was freed."""
        self._append(_FREE - block)
        if len(self._log) > _LONGEST_LOG:
            self._shorten_log()

    def reset_peak(self) -> None:
        self._append(_RESET_PEAK)

    def empty_cache(self) -> None:
        """Release unused cached segments."""
        self._append(_EMPTY_CACHE)

    def begin_anew(self) -> None:
        """Release unused cached segments, and reset peaks and retries."""
        self._log.extend((_FORGET_RETRIES, _EMPTY_CACHE, _RESET_PEAK))

    def set_capacity(self, capacity_bytes: int) -> None:
        """Change the capacity of the GPU."""
        if capacity_bytes != self._allocator.capacity_bytes:
            self.now().capacity_bytes = capacity_bytes

    def now(self) -> CachingAllocator:
        """Return the allocator, after processing the log."""
        count = len(self._log)
        entries = iter(self._log[:count])
        del self._log[:count]  # blocks may be freed in the meantime; their entries come later
        self._is_applying = True
        try:
            for entry in entries:
                self._apply(entry, entries)
        finally:
            self._is_applying = False
        return self._allocator

    def _shorten_log(self) -> None:
        if not self._is_applying:
            self.now()

    def _apply(self, entry: int, following: Iterator[int]) -> None:
        if entry >= 0:
            self._applied_blocks += 1
            self._place(self._applied_blocks, entry)
        elif entry <= _FREE:
            self._allocator.free(_FREE - entry)
        elif entry == _RESIZE:
            self._place(next(following), next(following))
        elif entry == _RESET_PEAK:
            self._allocator.reset_peaks()
        elif entry == _FORGET_RETRIES:
            self._allocator.retries = 0
        else:
            self._allocator.release_cached()

    def _place(self, block: int, packed: int) -> None:
        """Set a block's size and stream to those in ``packed``."""
        allocator, block_bytes = self._allocator, packed >> _STREAM_BITS & ~511
        if block not in allocator:
            if block_bytes:
                allocator.allocate(block, block_bytes, packed & _STREAM_MASK)
        elif block_bytes:
            allocator.resize(block, block_bytes, packed & _STREAM_MASK)
        else:
            allocator.free(block)
