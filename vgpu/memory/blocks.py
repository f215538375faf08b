"""Bytes on each virtual GPU: allocated, peak and capacity, and records of every change.

A block belongs to a storage, so it's counted once, however many tensors view it, and freed with the
last reference, whether that's a variable or a tensor saved by autograd. The block is an attribute
of the storage's Python object, which torch keeps alive as long as the storage itself.

How much CUDA's caching allocator would reserve for the blocks is computed on demand
(caching_allocator.py), and doesn't determine what fits. The memory of CUDA's context isn't counted.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vgpu.memory.caching_allocator import CachingAllocator, Reserve, Segment

# CUDACachingAllocator.cpp, kMinBlockSize: every request is rounded up to a multiple of this.
_ROUNDING_BYTES = 512


def rounded(request_bytes: int) -> int:
    """Return the number of bytes that the allocator allocates for a request."""
    return -(-request_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES


several_streams = False  # set by ``set_stream``; until then, each block is on a default stream


class Borrowed(Protocol):
    """Tensors that gloo uses for a collective (collectives/work.py)."""

    def is_dropped(self) -> bool: ...

    def wait_for_return(self) -> None: ...


borrowed: list[Borrowed] = []
"""Tensors that gloo alone may keep alive; a collective appends its own while it holds the lock."""
# Reentrant, since a finalizer that counts bytes may run in the thread that holds it.
borrowed_lock = threading.RLock()


def _wait_for_returns() -> None:
    """Wait until gloo has dropped the tensors of finished collectives, before bytes are counted."""
    with borrowed_lock:
        dropped = [each for each in borrowed if each.is_dropped()]
        borrowed[:] = [each for each in borrowed if each not in dropped]
    for each in dropped:
        each.wait_for_return()


# A finalizer may run between any two instructions, even in a thread that holds the lock.
_lock = threading.RLock()
# Called for each tensor; ``with`` is half as fast.
_acquire, _release = _lock.acquire, _lock.release
_memories: "list[DeviceMemory]" = []
_records: "list[MemoryRecord]" = []
_depth = 0  # of the current host: 0 for the real host, 1 for a cluster's


@contextmanager
def of_another_host() -> Iterator[None]:
    """Assign memories created in the ``with`` block to another host, which exists only within it.

    Freeing memory on a host that no longer exists changes that host's counters, but no record.
    """
    global _depth
    others = _memories[:]
    _memories.clear()
    _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            for memory in _memories:
                memory.is_gone = True
            _memories[:] = others


class DeviceMemory:
    """The counters of one virtual GPU."""

    def __init__(
        self, device: torch.device, capacity_bytes: int, current_stream: Callable[[int], int]
    ) -> None:
        """``current_stream`` maps a GPU's index to the number of its current stream."""
        self.device = device
        self._current_stream = current_stream
        self.capacity_bytes = capacity_bytes
        self.allowed_bytes: int | None = None
        """How many bytes this process may use; None means the full capacity."""
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.requested_bytes = 0  # before rounding
        self.peak_requested_bytes = 0
        self.allocation_count = 0
        self.freed_count = 0
        self.out_of_memory_count = 0
        self.is_gone = False
        self._depth = _depth
        self.reserve = Reserve(device, capacity_bytes)
        _memories.append(self)

    def settled(self) -> "DeviceMemory":
        """Return ``self`` once no freed memory is still counted."""
        if borrowed:
            _wait_for_returns()
        return self

    @property
    def live_block_count(self) -> int:
        return self.allocation_count - self.freed_count

    def require(self, request_bytes: int) -> int:
        """Return the rounded size of a request; raise OutOfMemoryError if it doesn't fit."""
        size_bytes = rounded(request_bytes)
        most_bytes = self.capacity_bytes if self.allowed_bytes is None else self.allowed_bytes
        if self.allocated_bytes + size_bytes > most_bytes:
            self.out_of_memory_count += 1
            raise torch.OutOfMemoryError(self._out_of_memory(size_bytes))
        return size_bytes

    def allocate(self, request_bytes: int, operation: str) -> "Block":
        """Count a new block of at least ``request_bytes``."""
        if borrowed:
            _wait_for_returns()
        _acquire()
        try:
            size_bytes = request_bytes + 511 & ~511  # rounded(), inlined for speed
            if (
                self.allocated_bytes + size_bytes > self.capacity_bytes
                or self.allowed_bytes is not None
            ):
                self.require(request_bytes)
            block = Block(self, request_bytes, size_bytes, operation)  # this may free other blocks
            self.allocation_count += 1
            self.allocated_bytes = allocated_bytes = self.allocated_bytes + size_bytes
            if allocated_bytes > self.peak_bytes:
                self.peak_bytes = allocated_bytes
            self.requested_bytes = requested_bytes = self.requested_bytes + request_bytes
            if requested_bytes > self.peak_requested_bytes:
                self.peak_requested_bytes = requested_bytes
            if not self.is_gone:
                stream = self._current_stream(self.device.index) if several_streams else 0
                block.number = self.reserve.new(size_bytes, stream)
                if _records:
                    self.record(block, size_bytes, size_bytes, stream, operation)
            return block
        finally:
            _release()

    def resize(self, block: "Block", size_bytes: int, operation: str) -> None:
        """Change the size of a block; the caller holds the lock."""
        more_bytes = size_bytes - block.size_bytes
        if more_bytes == 0:
            return
        self.allocated_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        if not self.is_gone:
            stream = 0
            if several_streams and size_bytes:
                stream = self._current_stream(self.device.index)
            self.reserve.resized(block.number, size_bytes, stream)
            self.record(block, more_bytes, size_bytes, stream, operation)

    def record(
        self, block: "Block", size_bytes: int, block_bytes: int, stream: int, operation: str
    ) -> None:
        """Add a change of ``size_bytes`` to all records; the block now has ``block_bytes``."""
        if size_bytes:
            for record in _records:
                if record.depth <= self._depth:
                    record.add(self, block, size_bytes, block_bytes, stream, operation)

    def set_capacity(self, capacity_bytes: int) -> None:
        with _lock:
            self.capacity_bytes = capacity_bytes
            self.reserve.set_capacity(capacity_bytes)

    def begin_anew(self) -> None:
        """Reset everything but live blocks, for a new program."""
        self.allowed_bytes = None
        self.out_of_memory_count = 0
        with _lock:
            self.peak_bytes = self.allocated_bytes
            self.peak_requested_bytes = self.requested_bytes
            if self.live_block_count:
                self.reserve.begin_anew()
            else:  # processing the old log would have no effect
                self.reserve = Reserve(self.device, self.capacity_bytes)

    def reset_peak(self) -> None:
        with _lock:
            self.peak_bytes = self.allocated_bytes
            self.peak_requested_bytes = self.requested_bytes
            self.reserve.reset_peak()

    def empty_cache(self) -> None:
        """Release reserved segments without allocated blocks."""
        with _lock:
            self.reserve.empty_cache()

    def reserved(self) -> tuple[int, int]:
        """Return the bytes that CUDA's allocator would reserve, and the peak since a reset."""
        with _lock:
            allocator = self.reserve.now()
            return allocator.reserved_bytes, allocator.peak_reserved_bytes

    def layout(self) -> list[Segment]:
        """Return the segments that CUDA's caching allocator would have, and their blocks."""
        with _lock:
            return self.reserve.now().layout()

    @property
    def retries(self) -> int:
        """How often the allocator would have released its cache and retried."""
        with _lock:
            return self.reserve.now().retries + self.out_of_memory_count

    @property
    def free_bytes(self) -> int:
        """Bytes that aren't reserved."""
        return max(self.capacity_bytes - self.reserved()[0], 0)

    def out_of_host_memory(self, size_bytes: int) -> str:
        """Return the error message for a block that fits on the GPU but not in host memory."""
        return (
            f"VGPU out of memory. Tried to allocate {format_size(size_bytes)} on {self.device}, "
            "whose values are stored in this machine's own memory, which has no room for them. Use "
            "smaller sizes, or vgpu.shapes_only(), which stores no values."
        )

    def _out_of_memory(self, size_bytes: int) -> str:
        # The message follows CUDACachingAllocator.cpp, which releases cached memory first.
        self.empty_cache()
        # With fragmentation, blocks may have needed more than the capacity (caching_allocator.py).
        reserved_bytes = min(self.reserved()[0], self.capacity_bytes)
        allocated = format_size(self.allocated_bytes)
        allowed = ""
        if self.allowed_bytes is not None:
            allowed = f"{format_size(self.allowed_bytes)} allowed; "
        return (
            f"VGPU out of memory. Tried to allocate {format_size(size_bytes)}. "
            f"GPU {self.device.index} has a total capacity of {format_size(self.capacity_bytes)} "
            f"of which {format_size(self.free_bytes)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(reserved_bytes)} memory "
            f"in use. {allowed}Of the allocated memory {allocated} is allocated by PyTorch, and "
            f"{format_size(reserved_bytes - self.allocated_bytes)} is reserved by PyTorch but "
            f"unallocated.{_of_rank()}"
        )


class Block:
    """The bytes of one storage; freed when this object is."""

    __slots__ = (
        "__weakref__",
        "made",
        "memory",
        "number",
        "operation",
        "request_bytes",
        "size_bytes",
        "storage",
        "uses",
    )

    def __init__(
        self, memory: DeviceMemory, request_bytes: int, size_bytes: int, operation: str
    ) -> None:
        self.memory = memory
        self.request_bytes = request_bytes
        self.number = 0  # its number in the reserve (caching_allocator.py)
        self.size_bytes = size_bytes
        self.operation = operation
        # The storage of a shape, created on demand; other blocks belong to storages with values.
        self.storage: Any = None
        # In a recording of virtual time, the operation that allocated the block, and its uses since
        # then (races.py).
        self.made: Any = None
        self.uses: Any = None

    def resize(self, request_bytes: int, operation: str) -> None:
        """Count a resized storage's new size; raise OutOfMemoryError if it doesn't fit."""
        with _lock:
            size_bytes = rounded(request_bytes)
            if size_bytes > self.size_bytes:
                self.memory.require(size_bytes - self.size_bytes)
            memory = self.memory
            memory.resize(self, size_bytes, operation)
            self.size_bytes = size_bytes
            memory.requested_bytes += request_bytes - self.request_bytes
            memory.peak_requested_bytes = max(memory.peak_requested_bytes, memory.requested_bytes)
            self.request_bytes = request_bytes

    def __del__(self) -> None:
        if self.uses is not None:
            self.uses.freed(self.made)
        _acquire()
        try:
            memory, size_bytes = self.memory, self.size_bytes
            memory.freed_count += 1
            memory.allocated_bytes -= size_bytes
            memory.requested_bytes -= self.request_bytes
            if size_bytes and not memory.is_gone:
                memory.reserve.freed(self.number)
                if _records:
                    memory.record(self, -size_bytes, 0, 0, self.operation)
        finally:
            _release()


def _of_rank() -> str:
    """Say which rank ran out of memory: GPUs of multiple ranks can have the same name."""
    if not dist.is_initialized():
        return ""
    return f" This happened on rank {dist.get_rank()} of {dist.get_world_size()}."


def format_size(size_bytes: int) -> str:
    """Format bytes as CUDA's allocator does (``format_size`` in CUDACachingAllocator.cpp)."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} bytes"


# Records of allocations and frees


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
        memories: Iterable[DeviceMemory],
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
        """Return the peak bytes allocated on ``device`` in the record, or 0 if it has no events."""
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
        """Apply the events on the allocator's device to it, and yield each one afterward."""
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
        memory: DeviceMemory,
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


@contextmanager
def record_memory(label: Callable[[], str] | None = None) -> Iterator[MemoryRecord]:
    """Record every allocation and free on any virtual GPU inside the block.

    ``label`` is called at each allocation, in the allocating thread; its result is stored in the
    event. Inside ``vgpu.cluster``, the record excludes GPUs outside the cluster, where garbage may
    be collected in the meantime.
    """
    if borrowed:
        _wait_for_returns()
    with _lock:
        record = MemoryRecord(_memories, label, _depth)
        _records.append(record)
    try:
        yield record
    finally:
        if borrowed:
            _wait_for_returns()
        with _lock:
            _records[:] = [other for other in _records if other is not record]
