"""What CUDA's caching allocator would hold now, worked out when somebody asks.

A block's way through the allocator takes longer than to note it. So blocks are noted, in 8 bytes
each time, and played when somebody asks, or when the notes have become many.

Left out, besides what caching_allocator.py leaves out: outside of a recording, what a backward pass
allocates lies on the default stream. CUDA's allocator fails where it finds no room between blocks;
a virtual GPU goes on, and has then reserved more than it has.
"""

from array import array
from collections.abc import Iterator

import torch

from vgpu.memory.caching_allocator import CachingAllocator

_MOST_NOTES = 2**21  # 16 MiB; playing them takes a few seconds
_STREAM_BITS = 11  # a block is a multiple of 512 bytes, so this many more leave room for 20
_STREAM_MASK = 2**20 - 1
# Notes below 0. After _RESIZE come a block's number, and its bytes and stream; _FREE less a block's
# number is its end.
_RESET_PEAK, _EMPTY_CACHE, _RESIZE, _FORGET_RETRIES, _FREE = -1, -2, -3, -4, -5


class Reserve:
    """Segments of one GPU, as the allocator would have them."""

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self._allocator = CachingAllocator(device, capacity_bytes, goes_on=True)
        # A finalizer may add one between any two others, so what belongs together is added at once.
        self._notes = array("q")
        self._add = self._notes.append
        self._noted_blocks = self._played_blocks = 0
        self._is_playing = False

    def new(self, block_bytes: int, stream: int) -> int:
        """A new block has so many bytes: 512, a multiple or none. Returns its number."""
        packed = block_bytes << _STREAM_BITS | stream & _STREAM_MASK
        number = self._noted_blocks = self._noted_blocks + 1
        self._add(packed)  # in the order of their numbers, which notes do not repeat
        if len(self._notes) > _MOST_NOTES:
            self._are_many()
        return number

    def resized(self, block: int, block_bytes: int, stream: int) -> None:
        """The block of this number has so many bytes from now on, perhaps none."""
        packed = block_bytes << _STREAM_BITS | stream & _STREAM_MASK
        self._notes.extend((_RESIZE, block, packed))

    def freed(self, block: int) -> None:
        """The block of this number, which had some bytes, is gone."""
        self._add(_FREE - block)
        if len(self._notes) > _MOST_NOTES:
            self._are_many()

    def reset_peak(self) -> None:
        self._add(_RESET_PEAK)

    def empty_cache(self) -> None:
        """Give back what lies free in whole segments."""
        self._add(_EMPTY_CACHE)

    def begin_anew(self) -> None:
        """Give back what lies free, and count peaks and retries from now on."""
        self._notes.extend((_FORGET_RETRIES, _EMPTY_CACHE, _RESET_PEAK))

    def set_capacity(self, capacity_bytes: int) -> None:
        """From now on the GPU has so many bytes."""
        if capacity_bytes != self._allocator.capacity_bytes:
            self.now().capacity_bytes = capacity_bytes

    def now(self) -> CachingAllocator:
        """The allocator after everything that was noted."""
        count = len(self._notes)
        notes = iter(self._notes[:count])
        del self._notes[:count]  # blocks may be freed meanwhile; their notes come later
        self._is_playing = True
        try:
            for note in notes:
                self._play(note, notes)
        finally:
            self._is_playing = False
        return self._allocator

    def _are_many(self) -> None:
        if not self._is_playing:
            self.now()

    def _play(self, note: int, following: Iterator[int]) -> None:
        if note >= 0:
            self._played_blocks += 1
            self._place(self._played_blocks, note)
        elif note <= _FREE:
            self._allocator.free(_FREE - note)
        elif note == _RESIZE:
            self._place(next(following), next(following))
        elif note == _RESET_PEAK:
            self._allocator.reset_peaks()
        elif note == _FORGET_RETRIES:
            self._allocator.retries = 0
        else:
            self._allocator.release_cached()

    def _place(self, block: int, packed: int) -> None:
        """Let a block have as many bytes as a note says."""
        allocator, block_bytes = self._allocator, packed >> _STREAM_BITS & ~511
        if block not in allocator:
            if block_bytes:
                allocator.allocate(block, block_bytes, packed & _STREAM_MASK)
        elif block_bytes:
            allocator.resize(block, block_bytes, packed & _STREAM_MASK)
        else:
            allocator.free(block)
