"""Reserved bytes by the rules of CUDACachingAllocator.cpp, worked out by hand, and as it gave them."""

import random

import pytest
import torch

from vgpu.memory.caching_allocator import CachingAllocator

KIB, MIB = 2**10, 2**20
GPU = torch.device("cpu")  # only named in messages


def allocator(capacity_mib=1024, expandable=False):
    return CachingAllocator(GPU, capacity_mib * MIB, expandable)


def allocated(sizes_mib, **options):
    """Blocks 0, 1, 2 and so on, of these sizes, on the default stream."""
    made = allocator(**options)
    for block, size_mib in enumerate(sizes_mib):
        made.allocate(block, int(size_mib * MIB), 0)
    return made


def mib(made):
    return made.reserved_bytes / MIB, made.allocated_bytes / MIB, made.segments


def test_small_blocks_share_segments_of_2_mib():
    made = allocated([0.25] * 8)
    assert mib(made) == (2, 2, 1)
    made.allocate(8, 512, 0)
    assert mib(made) == (4, 2 + 512 / MIB, 2)
    # The last small size is 1 MiB; 512 bytes more come from a segment of 20 MiB.
    assert mib(allocated([1])) == (2, 1, 1)
    assert mib(allocated([1 + 512 / MIB])) == (20, 1 + 512 / MIB, 1)


def test_blocks_of_5_mib_share_segments_of_20_mib():
    assert mib(allocated([5])) == (20, 5, 1)
    assert mib(allocated([5, 5, 5])) == (20, 15, 1)
    assert mib(allocated([5, 5, 5, 5])) == (20, 20, 1)
    assert mib(allocated([5, 5, 5, 5, 5])) == (40, 25, 2)


@pytest.mark.parametrize(
    ("size_mib", "reserved_mib", "allocated_mib"),
    [
        (30, 30, 30),
        (10, 10, 10),
        (10 - 512 / MIB, 20, 10 - 512 / MIB),  # below 10 MiB: cut from 20
        (11, 12, 12),  # 1 MiB is left, and only more than that is cut off
        (13.5, 14, 14),
    ],
)
def test_large_blocks_have_a_segment_of_their_own(size_mib, reserved_mib, allocated_mib):
    assert mib(allocated([size_mib])) == (reserved_mib, allocated_mib, 1)


def test_a_small_segment_is_split_where_512_bytes_are_left():
    made = allocated([1, 1 - 512 / MIB])
    made.allocate(2, 512, 0)
    assert mib(made) == (2, 2, 1)


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    made = allocated([40, 24, 32])
    for block in range(3):
        made.free(block)
    made.allocate(3, 23 * MIB, 0)  # in 24, whole
    assert mib(made) == (96, 24, 3)
    made.allocate(4, 32 * MIB, 0)  # in 32
    made.allocate(5, 40 * MIB, 0)  # in 40
    assert mib(made) == (96, 96, 3)


def test_free_neighbours_become_one_block():
    made = allocated([5, 5, 5])  # and 5 free
    made.free(0)
    made.free(1)  # 10 free, 5 used, 5 free
    made.allocate(3, 9 * MIB, 0)  # the 10, whole: 1 MiB is not cut off
    assert mib(made) == (20, 15, 1)
    made.free(3)
    made.free(2)  # 20 free
    made.allocate(4, 20 * MIB, 0)
    assert mib(made) == (20, 20, 1)


def test_streams_do_not_share():
    for expandable in (False, True):
        made = allocator(expandable=expandable)
        made.allocate(0, 5 * MIB, 0)
        made.free(0)
        made.allocate(1, 5 * MIB, 7)
        assert mib(made) == (40, 5, 2)
        made.allocate(2, 5 * MIB, 0)
        assert mib(made) == (40, 10, 2)


def test_an_expandable_segment_leaves_no_gaps():
    plain, expandable = allocated([30] * 3), allocated([30] * 3, expandable=True)
    # Three segments of 30, or one of five pages of 20.
    assert (mib(plain), mib(expandable)) == ((90, 90, 3), (100, 90, 1))
    for made in (plain, expandable):
        made.free(0)
        made.free(2)
        made.allocate(3, 40 * MIB, 0)
    # 30 and 30 are free apart and 40 is asked for; the last 30 and the 10 behind it are 40.
    assert (mib(plain), mib(expandable)) == ((130, 70, 4), (100, 70, 1))


def test_an_expandable_segment_cuts_off_all_that_is_left():
    made = allocated([11, 9], expandable=True)  # 11 of a page of 20, and the 9 behind it
    assert mib(made) == (20, 20, 1)
    made = allocated([0.5, 1, 1], expandable=True)  # small pages have 2 MiB
    assert mib(made) == (4, 2.5, 1)


def test_cached_segments_go_back_before_memory_runs_out():
    made = allocated([30], capacity_mib=40)
    made.free(0)
    made.allocate(1, 40 * MIB, 0)
    assert (mib(made), made.retries, made.peak_reserved_bytes) == ((40, 40, 1), 1, 40 * MIB)


def test_pages_go_back_before_memory_runs_out():
    made = allocated([50, 10], capacity_mib=100, expandable=True)  # three pages, all used
    made.free(0)  # pages 0 and 1 are free, page 2 half
    made.allocate(1 << 9, 40 * MIB, 3)  # of another stream: two pages more
    assert (mib(made), made.retries) == ((100, 50, 2), 0)
    made.allocate(1 << 10, 20 * MIB, 3)  # pages 0 and 1 go back, then one more
    assert (mib(made), made.retries) == ((80, 70, 2), 1)


def test_memory_runs_out_between_blocks_in_use():
    def ask(expandable):
        made = allocated([5] * 8, capacity_mib=40, expandable=expandable)
        for block in range(1, 7):
            made.free(block)
        made.allocate(8, 20 * MIB, 0)  # free are 15 and 15, side by side
        return made

    with pytest.raises(torch.OutOfMemoryError) as raised:
        ask(expandable=False)
    assert str(raised.value) == (
        "CUDA's caching allocator has no room for 20 MiB on cpu, stream 0: of 40 MiB, 40 MiB are "
        "reserved and 10 MiB allocated. What is reserved and not allocated lies between blocks in "
        "use, or is too small; expandable_segments=True may find room"
    )
    assert mib(ask(expandable=True)) == (40, 30, 1)


def test_a_block_that_grows_is_copied():
    made = allocated([12])
    made.resize(0, 30 * MIB, 0)
    assert mib(made) == (42, 30, 2)
    assert made.peak_allocated_bytes == 42 * MIB


def test_a_segment_is_whole_again_when_all_its_blocks_are_freed():
    for expandable in (False, True):
        generator = random.Random(0)
        made = allocator(expandable=expandable)
        live = []
        for block in range(300):
            made.allocate(block, generator.randint(1, 8000) * 512, generator.randrange(2))
            live.append(block)
            if len(live) > 20:
                made.free(live.pop(generator.randrange(len(live))))
        for block in live:
            made.free(block)
        pieces = list(made._mapped())
        assert made.allocated_bytes == 0
        assert len(pieces) == made.segments
        assert sum(piece.size_bytes for piece in pieces) == made.reserved_bytes


def counts_of_a_random_program(made, seed):
    """What the allocator has counted after each event, and how often it has run out of memory."""
    generator = random.Random(seed)
    live, counted, out_of_memory = [], [], 0
    for block in range(600):
        if live and generator.random() < (0.55 if len(live) > 15 else 0.35):
            made.free(live.pop(generator.randrange(len(live))))
        else:
            most = generator.choice([2_000, 20_000, 200_000])  # units of 512 bytes
            try:
                made.allocate(block, 512 * generator.randint(1, most), generator.randrange(2))
                live.append(block)
            except torch.OutOfMemoryError:
                out_of_memory += 1
        counted.append(
            (made.reserved_bytes, made.allocated_bytes, made.segments, made.retries, out_of_memory)
        )
    return counted


@pytest.mark.parametrize(
    ("capacity_mib", "expandable", "expected"),
    [
        (81920, False, (589_645_742_080, 167_323_998_208, 12_566, 0, 0)),
        (81920, True, (416_500_678_656, 166_997_034_496, 2_392, 0, 0)),
        (700, False, (369_612_554_240, 195_705_296_896, 7_063, 2_892, 875)),
        (700, True, (370_103_287_808, 193_379_826_176, 3_599, 2_808, 585)),
        (333, False, (185_316_933_632, 104_511_281_152, 4_923, 16_967, 13_858)),
        (333, True, (187_233_730_560, 129_558_452_224, 3_053, 16_177, 11_535)),
    ],
)
def test_random_programs_end_as_with_pytorch_s_own_allocator(capacity_mib, expandable, expected):
    """The sums of all counts after each of 600 events, as the allocator of PyTorch 2.15 has them.

    Its compiled code (libc10_cuda.so) got the same events, over functions in place of CUDA's that
    only count bytes.
    """
    made = allocator(capacity_mib, expandable)
    counted = counts_of_a_random_program(made, seed=capacity_mib)
    assert tuple(map(sum, zip(*counted, strict=True))) == expected
