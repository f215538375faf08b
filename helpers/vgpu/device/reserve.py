"""What CUDA's caching allocator would hold now, worked out when somebody asks.

A block's way through the allocator takes longer than to note it. So blocks are noted, in 16 bytes
each time, and played when somebody asks, or when the notes have become many.

Left out, besides what caching_allocator.py leaves out: outside of a recording, what a backward pass
allocates lies on the default stream. CUDA's allocator fails where it finds no room between blocks;
a virtual GPU goes on, and has then reserved more than it has.
"""

from array import array

import torch

from helpers.vgpu.device.caching_allocator import CachingAllocator

_MOST_NOTES = 2**21  # 16 MiB; playing them takes a second or two
_STREAM_BITS = 11  # a block is a multiple of 512 bytes, so this many more leave room for 20
_STREAM_MASK = 2**20 - 1
# In place of a block's number.
_RESET_PEAK, _EMPTY_CACHE = -1, -2


class Reserve:
    """Segments of one GPU, as the allocator would have them."""

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self._allocator = CachingAllocator(device, capacity_bytes, goes_on=True)
        self._notes = array("q")  # a block's number, and its bytes and stream from now on
        self._is_playing = False

    def note(self, block: int, block_bytes: int, stream: int) -> None:
        """A block has so many bytes from now on, none if it is freed; 512 or a multiple."""
        self._notes.extend((block, block_bytes << _STREAM_BITS | stream & _STREAM_MASK))
        if len(self._notes) > _MOST_NOTES and not self._is_playing:
            self.now()

    def reset_peak(self) -> None:
        self._notes.extend((_RESET_PEAK, 0))

    def empty_cache(self) -> None:
        """Give back what lies free in whole segments."""
        self._notes.extend((_EMPTY_CACHE, 0))

    def set_capacity(self, capacity_bytes: int) -> None:
        """From now on the GPU has so many bytes."""
        if capacity_bytes != self._allocator.capacity_bytes:
            self.now().capacity_bytes = capacity_bytes

    def now(self) -> CachingAllocator:
        """The allocator after everything that was noted."""
        notes, self._notes = self._notes, array("q")
        self._is_playing = True  # blocks may be freed meanwhile; their notes come later
        try:
            for at in range(0, len(notes), 2):
                self._play(notes[at], notes[at + 1])
        finally:
            self._is_playing = False
        return self._allocator

    def _play(self, block: int, packed: int) -> None:
        allocator = self._allocator
        if block == _RESET_PEAK:
            allocator.reset_peaks()
        elif block == _EMPTY_CACHE:
            allocator.release_cached()
        elif packed == 0:
            allocator.free(block)
        else:
            block_bytes = packed >> _STREAM_BITS & ~511
            place = allocator.resize if block in allocator else allocator.allocate
            place(block, block_bytes, packed & _STREAM_MASK)
