"""Bytes on each virtual GPU: allocated, peak and capacity.

A block belongs to a storage, so it's counted once, however many tensors view it, and freed with the
last reference, be it a variable or a tensor saved by autograd. The block is an attribute of the
storage's Python object, which torch keeps alive as long as the storage itself.

How much CUDA's caching allocator would reserve for the blocks is computed on demand (records.py),
and doesn't determine what fits. The memory of CUDA's context isn't counted.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vgpu.memory.caching_allocator import Segment
from vgpu.memory.records import MemoryRecord, Reserve

# CUDACachingAllocator.cpp, kMinBlockSize: every request is rounded up to a multiple of this.
_ROUNDING_BYTES = 512


def rounded(request_bytes: int) -> int:
    """Return the number of bytes that the allocator allocates for a request."""
    return -(-request_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES


several_streams = False  # set by time/streams.py; until then, each block is on a default stream


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
_records: list[MemoryRecord] = []
_depth = 0  # of the current host: 0 for the real host, 1 for a cluster's


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
        # With fragmentation, blocks may have needed more than the capacity (records.py).
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
        self.number = 0  # its number in the reserve (records.py)
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
