"""Reserved bytes match CUDACachingAllocator.cpp: calculated by hand, and by the real allocator."""

import random

import pytest
import torch

from vgpu.memory.caching_allocator import CachingAllocator

KIB, MIB = 2**10, 2**20
GPU = torch.device("cpu")  # used only in messages


def allocator(capacity_mib=1024, expandable=False):
    return CachingAllocator(GPU, capacity_mib * MIB, expandable)


def allocated(sizes_mib, **options):
    """Allocate blocks 0, 1, 2 and so on, of these sizes, on the default stream."""
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
    # The largest small block is 1 MiB; 512 bytes more come from a 20 MiB segment.
    assert mib(allocated([1])) == (2, 1, 1)
    assert mib(allocated([1 + 512 / MIB])) == (20, 1 + 512 / MIB, 1)


@pytest.mark.parametrize(
    ("size_mib", "reserved_mib", "allocated_mib"),
    [
        (30, 30, 30),
        (10, 10, 10),
        (10 - 512 / MIB, 20, 10 - 512 / MIB),  # below 10 MiB: part of a 20 MiB segment
        (11, 12, 12),  # only a remainder of more than 1 MiB is split off
        (13.5, 14, 14),
    ],
)
def test_large_blocks_have_their_own_segment(size_mib, reserved_mib, allocated_mib):
    assert mib(allocated([size_mib])) == (reserved_mib, allocated_mib, 1)


def test_an_expandable_segment_leaves_no_gaps():
    plain, expandable = allocated([30] * 3), allocated([30] * 3, expandable=True)
    # Three segments of 30 MiB, or one of five 20 MiB pages.
    assert (mib(plain), mib(expandable)) == ((90, 90, 3), (100, 90, 1))
    for made in (plain, expandable):
        made.free(0)
        made.free(2)
        made.allocate(3, 40 * MIB, 0)
    # Two separate blocks of 30 MiB are free, and 40 MiB are requested: the second block and the
    # 10 MiB after it suffice.
    assert (mib(plain), mib(expandable)) == ((130, 70, 4), (100, 70, 1))


def counts_of_a_random_program(made, seed):
    """Return the allocator's counts after each event, and how often it ran out of memory."""
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
def test_random_programs_have_the_same_counts_as_in_pytorchs_allocator(
    capacity_mib, expandable, expected
):
    """Check the sums of all counts after each of 600 events against PyTorch 2.15's allocator.

    Its compiled code (libc10_cuda.so) got the same events, with CUDA's functions replaced by ones
    that only count bytes.
    """
    made = allocator(capacity_mib, expandable)
    counted = counts_of_a_random_program(made, seed=capacity_mib)
    assert tuple(map(sum, zip(*counted, strict=True))) == expected
