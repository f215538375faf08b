"""A model of how much memory CUDA's caching allocator reserves for a program's allocations.

It follows PyTorch's c10/cuda/CUDACachingAllocator.cpp at commit 001074d, and was compared event by
event with the compiled allocator in PyTorch 2.15; comments name that file's functions and
constants. Settings are the defaults, or ``expandable_segments:True``.

The model leaves out ``record_stream``, which on CUDA delays the reuse of a block until another
stream has caught up, and memory that's allocated outside the allocator (the CUDA context, NCCL).
``Reserve``, which a virtual GPU uses, also differs from CUDA's allocator in two ways:
outside a recording of virtual time, it assumes that a backward pass allocates on the default
stream; and if fragmentation leaves no room, CUDA's allocator fails, whereas a virtual GPU exceeds
its capacity.
"""

import itertools
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

import torch

from vgpu.units import format_bytes

_MIB = 2**20
_LEAST_BYTES = 512  # kMinBlockSize
_SMALL_BYTES = _MIB  # kSmallSize: allocations up to this size are small
_SMALL_SEGMENT_BYTES = 2 * _MIB  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * _MIB  # kLargeBuffer
_OWN_SEGMENT_BYTES = 10 * _MIB  # kMinLargeAlloc: from this size on, a block has its own segment,
_OWN_SEGMENT_STEP_BYTES = 2 * _MIB  # kRoundLarge: whose size is a multiple of this
# The distance between the starts of two segments: larger than any GPU's memory, and a multiple of
# both pools' page sizes.
SEGMENT_DISTANCE_BYTES = _LARGE_SEGMENT_BYTES << 30

_OLD_BLOCK = -1  # a key that can't be a block number, since those start at 0


class _Piece:
    """A part of a segment: a block in use, a free block, or addresses without memory.

    The pieces of a segment form a linked list.
    """

    __slots__ = ("address", "after", "before", "is_mapped", "is_used", "pool", "size_bytes")

    def __init__(self, pool: "_Pool", address: int, size_bytes: int, is_mapped: bool) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.is_mapped = is_mapped
        self.is_used = False
        self.before: _Piece | None = None
        self.after: _Piece | None = None

    def cut(self, size_bytes: int) -> "_Piece":
        """Keep the first ``size_bytes``; return the rest as a new piece."""
        rest = _Piece(
            self.pool, self.address + size_bytes, self.size_bytes - size_bytes, self.is_mapped
        )
        self.size_bytes = size_bytes
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after = rest
        return rest

    def merge(self) -> None:
        """Merge with free neighbors of the same kind (``try_merge_blocks``)."""
        before, after = self.before, self.after
        if before is not None and not before.is_used and before.is_mapped == self.is_mapped:
            self.pool.remove(before)
            self.address = before.address
            self.size_bytes += before.size_bytes
            self.before = before.before
            if self.before is not None:
                self.before.after = self
        if after is not None and not after.is_used and after.is_mapped == self.is_mapped:
            self.pool.remove(after)
            self.size_bytes += after.size_bytes
            self.after = after.after
            if self.after is not None:
                self.after.before = self

    @property
    def reach_bytes(self) -> int:
        """The piece's size plus the range after it into which an expandable segment can grow."""
        after = self.after
        grows = after is not None and not after.is_mapped
        return self.size_bytes + (after.size_bytes if after is not None and grows else 0)


class _Pool:
    """The free pieces of one stream, for small or for large blocks."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.page_bytes = _SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
        self.free: list[tuple[int, int, _Piece]] = []  # size, address; smallest first
        self.unmapped: list[tuple[int, _Piece]] = []  # address

    def add(self, piece: _Piece) -> None:
        if piece.is_mapped:
            insort(self.free, (piece.size_bytes, piece.address, piece))
        else:
            insort(self.unmapped, (piece.address, piece))

    def remove(self, piece: _Piece) -> None:
        if piece.is_mapped:
            del self.free[bisect_left(self.free, (piece.size_bytes, piece.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (piece.address,))]

    def best_fit(self, size_bytes: int) -> _Piece | None:
        """Remove and return the smallest free piece that's large enough (``get_free_block``).

        A piece that can grow counts as the size to which it can grow.
        """
        at = bisect_left(self.free, (size_bytes,))
        if at == len(self.free):
            return None
        while at + 1 < len(self.free) and (
            self.free[at + 1][2].reach_bytes < self.free[at][2].reach_bytes
        ):
            at += 1
        return self.free.pop(at)[2]

    def room(self, size_bytes: int) -> _Piece | None:
        """Find room for a block in an expandable segment (``find_expandable_block``).

        The room starts at addresses without memory, or at a free piece right before them.
        """
        for _, unmapped in self.unmapped:
            start = unmapped
            if unmapped.before is not None and not unmapped.before.is_used:
                start = unmapped.before
            found_bytes, piece = 0, start
            while found_bytes < size_bytes:
                found_bytes += piece.size_bytes
                if piece.after is None or piece.after.is_used:
                    break
                piece = piece.after
            if found_bytes >= size_bytes:
                return start
        return None


class Segment(NamedTuple):
    """A contiguous range of reserved memory, as listed by ``torch.cuda.memory_snapshot``."""

    stream: int
    is_small: bool
    pieces: list[tuple[int, int, int | None]]
    """The pieces in order: address, bytes, and the block's number if the piece is in use."""


class CachingAllocator:
    """The segments of one GPU and the blocks in them.

    The terms are those of ``torch.cuda``: ``peak_reserved_bytes`` is its ``max_memory_reserved()``.
    If what remains of a piece is too small to split off, the piece counts as allocated in full,
    which is up to 1 MiB more than was requested.
    """

    def __init__(
        self,
        device: torch.device,
        capacity_bytes: int,
        expandable_segments: bool = False,
        may_exceed_capacity: bool = False,
    ) -> None:
        """``device`` is used in messages; ``capacity_bytes`` is the most that can be reserved.

        With ``may_exceed_capacity``, a block that doesn't fit gets memory beyond the capacity
        instead of raising an error.
        """
        self.device = device
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.may_exceed_capacity = may_exceed_capacity
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.retries = 0  # how often cached segments were freed because memory ran out
        self._pools: dict[tuple[int, bool], _Pool] = {}  # by stream and is_small
        self._used: dict[int, _Piece] = {}
        self._next_address = 0

    def allocate(self, block: int, size_bytes: int, stream: int) -> None:
        """Allocate a block with this number (``malloc``).

        ``size_bytes`` is a multiple of 512. Raises OutOfMemoryError if the block doesn't fit.
        """
        is_small = size_bytes <= _SMALL_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small)
        piece = pool.best_fit(size_bytes) or self._take(pool, size_bytes)
        if piece is None:
            self.release_cached()
            self.retries += 1
            piece = self._take(pool, size_bytes, self.may_exceed_capacity)
            if piece is None:
                raise self._out_of_memory(size_bytes, stream)
        left_bytes = piece.size_bytes - size_bytes
        if (  # should_split
            left_bytes >= _LEAST_BYTES
            if is_small or self.expandable_segments
            else left_bytes > _SMALL_BYTES
        ):
            pool.add(piece.cut(size_bytes))
        piece.is_used = True
        self._used[block] = piece
        self.allocated_bytes += piece.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, block: int) -> None:
        """Free a block; its memory stays reserved for its stream (``free_block``)."""
        piece = self._used.pop(block)
        self.allocated_bytes -= piece.size_bytes
        piece.is_used = False
        piece.merge()
        piece.pool.add(piece)

    def resize(self, block: int, size_bytes: int, stream: int) -> None:
        """Move a block to a new allocation and copy its values there (``resize_bytes_cuda``)."""
        self._used[_OLD_BLOCK] = self._used.pop(block)  # until the values are copied
        self.allocate(block, size_bytes, stream)
        self.free(_OLD_BLOCK)

    def __contains__(self, block: int) -> bool:
        """Whether a block with this number is in use."""
        return block in self._used

    def reset_peaks(self) -> None:
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_allocated_bytes = self.allocated_bytes

    @property
    def segments(self) -> int:
        """The number of segments."""
        return sum(1 for _ in self._heads())

    def layout(self) -> list[Segment]:
        """Return all segments in address order."""
        kinds = {id(pool): key for key, pool in self._pools.items()}
        blocks = {id(piece): block for block, piece in self._used.items()}
        found = []
        for head in sorted(self._heads(), key=lambda piece: piece.address):
            pieces: list[tuple[int, int, int | None]] = []
            piece: _Piece | None = head
            while piece is not None and piece.is_mapped:
                pieces.append((piece.address, piece.size_bytes, blocks.get(id(piece))))
                piece = piece.after
            found.append(Segment(*kinds[id(head.pool)], pieces))
        return found

    def address(self, block: int) -> int:
        """Return the address of a block in use."""
        return self._used[block].address

    def _heads(self) -> Iterator[_Piece]:
        """Yield the first piece of each segment."""
        free = (piece for pool in self._pools.values() for _, _, piece in pool.free)
        for piece in itertools.chain(self._used.values(), free):
            if piece.before is None or not piece.before.is_mapped:
                yield piece

    # Reserving and releasing the GPU's memory

    def _take(self, pool: _Pool, size_bytes: int, may_exceed: bool = False) -> _Piece | None:
        """Return a free piece of newly reserved memory, or None if none is left (``alloc_block``).

        With ``may_exceed``, reserve memory beyond the capacity if necessary.
        """
        if self.expandable_segments:
            return self._expand(pool, size_bytes)
        if pool.is_small:
            segment_bytes = _SMALL_SEGMENT_BYTES
        elif size_bytes < _OWN_SEGMENT_BYTES:
            segment_bytes = _LARGE_SEGMENT_BYTES
        else:
            segment_bytes = _rounded_up(size_bytes, _OWN_SEGMENT_STEP_BYTES)
        has_room = self._reserve(segment_bytes, may_exceed)
        return self._new_segment(pool, segment_bytes) if has_room else None

    def _new_segment(self, pool: _Pool, size_bytes: int, is_mapped: bool = True) -> _Piece:
        self._next_address += SEGMENT_DISTANCE_BYTES
        return _Piece(pool, self._next_address, size_bytes, is_mapped)

    def _reserve(self, size_bytes: int, may_exceed: bool = False) -> bool:
        if self.reserved_bytes + size_bytes > self.capacity_bytes and not may_exceed:
            return False
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _expand(self, pool: _Pool, size_bytes: int) -> _Piece | None:
        """Grow a segment by whole pages (``try_allocate_expandable_block``)."""
        piece = pool.room(size_bytes)
        if piece is None:
            addresses = self.capacity_bytes + self.capacity_bytes // 8
            addresses = _rounded_up(addresses, pool.page_bytes)
            piece = self._new_segment(pool, addresses, is_mapped=False)
            pool.add(piece)
        if not piece.is_mapped and not self._map(piece, min(size_bytes, piece.size_bytes)):
            return None
        while piece.size_bytes < size_bytes:
            rest = piece.after
            assert rest is not None, "room() found enough"
            if not self._map(rest, min(size_bytes - piece.size_bytes, rest.size_bytes)):
                return None
            piece = rest  # the rest, merged with the piece before
        pool.remove(piece)
        return piece

    def _map(self, piece: _Piece, size_bytes: int) -> bool:
        """Map memory to the first addresses of a piece (``map_block``)."""
        size_bytes = _rounded_up(size_bytes, piece.pool.page_bytes)
        if not self._reserve(size_bytes):
            return False
        piece.pool.remove(piece)
        if size_bytes < piece.size_bytes:
            piece.pool.add(piece.cut(size_bytes))
        piece.is_mapped = True
        piece.merge()
        piece.pool.add(piece)
        return True

    def release_cached(self) -> None:
        """Release unused segments and pages (``release_cached_blocks``)."""
        for pool in self._pools.values():
            for _, _, piece in list(pool.free):
                if self.expandable_segments:
                    self._unmap(piece)
                elif piece.before is None and piece.after is None:
                    pool.remove(piece)
                    self.reserved_bytes -= piece.size_bytes

    def _unmap(self, piece: _Piece) -> None:
        """Release the pages that lie entirely within a free piece (``unmap_block``)."""
        pool, page_bytes = piece.pool, piece.pool.page_bytes
        begin = _rounded_up(piece.address, page_bytes)
        end = (piece.address + piece.size_bytes) // page_bytes * page_bytes
        if begin >= end:
            return
        pool.remove(piece)
        if begin > piece.address:
            front, piece = piece, piece.cut(begin - piece.address)
            pool.add(front)
        if piece.size_bytes > end - begin:
            pool.add(piece.cut(end - begin))
        self.reserved_bytes -= piece.size_bytes
        piece.is_mapped = False
        piece.merge()
        if piece.before is not None or piece.after is not None:  # otherwise the segment is gone
            pool.add(piece)

    def _out_of_memory(self, size_bytes: int, stream: int) -> torch.OutOfMemoryError:
        advice = "" if self.expandable_segments else "; expandable_segments=True may find room"
        return torch.OutOfMemoryError(
            f"CUDA's caching allocator has no room for {format_bytes(size_bytes)} on "
            f"{self.device}, stream {stream}: of {format_bytes(self.capacity_bytes)}, "
            f"{format_bytes(self.reserved_bytes)} is reserved and "
            f"{format_bytes(self.allocated_bytes)} is allocated. Reserved but unallocated memory "
            f"is split by blocks in use, or its pieces are too small{advice}"
        )


def _rounded_up(size_bytes: int, step_bytes: int) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


# What the allocator would reserve on a virtual GPU, computed on demand
#
# ``Reserve`` is behind ``torch.vgpu.memory_reserved`` and similar functions. Simulating the
# allocator takes longer than logging, so allocations are logged, in 8 bytes each, and the allocator
# processes the log when it's queried or when the log gets long.

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
