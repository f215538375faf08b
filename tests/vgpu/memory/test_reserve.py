"""Reserved memory as reported by torch.vgpu: the segments that CUDA's allocator would have."""

import gc
import random

import pytest
import torch

import vgpu
from vgpu.memory import blocks as memory
from vgpu.memory import caching_allocator

MIB = 2**20

pytestmark = pytest.mark.virtual_gpus(2, memory_bytes=256 * MIB)


@pytest.fixture(autouse=True)
def empty(_virtual_gpus):
    gc.collect()
    torch.vgpu.empty_cache()
    torch.vgpu.reset_peak_memory_stats(0)
    assert torch.vgpu.memory_reserved(0) == 0


def of(size_mib, device="vgpu:0"):
    return torch.empty(int(size_mib * MIB), dtype=torch.uint8, device=device)


def reserved_mib(device=0):
    return torch.vgpu.memory_reserved(device) // MIB


@pytest.mark.parametrize(("size_mib", "expected"), [(0.5, 2), (1, 2), (5, 20), (11, 12), (30, 30)])
def test_a_blocks_segment_stays_reserved_when_the_block_is_freed(size_mib, expected):
    x = of(size_mib)
    assert reserved_mib() == expected
    assert reserved_mib(1) == 0
    del x
    assert (torch.vgpu.memory_allocated(), reserved_mib()) == (0, expected)
    y = of(size_mib)  # in the same place
    assert reserved_mib() == expected
    free, total = torch.vgpu.mem_get_info()
    assert (free // MIB, total // MIB) == (256 - expected, 256)
    del y


def test_empty_cache_releases_only_unused_segments():
    kept, x, y = of(5), of(5), of(30)
    del x, y
    assert reserved_mib() == 50
    torch.vgpu.empty_cache()
    assert reserved_mib() == 20
    assert torch.vgpu.max_memory_reserved() == 50 * MIB
    torch.vgpu.reset_peak_memory_stats()
    assert torch.vgpu.max_memory_reserved() == 20 * MIB
    assert kept.numel() == 5 * MIB


def test_all_functions_report_the_same_reserved_bytes():
    x = of(5)
    stats = torch.vgpu.memory_stats()
    assert (
        stats
        == torch.accelerator.memory_stats(0)
        == {
            "active_bytes.all.current": 5 * MIB,
            "active_bytes.all.peak": stats["allocated_bytes.all.peak"],
            "allocated_bytes.all.current": 5 * MIB,
            "allocated_bytes.all.peak": stats["allocated_bytes.all.peak"],
            "requested_bytes.all.current": 5 * MIB,
            "requested_bytes.all.peak": stats["allocated_bytes.all.peak"],
            "reserved_bytes.all.current": 20 * MIB,
            "reserved_bytes.all.peak": 20 * MIB,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }
    )
    assert torch.accelerator.memory_reserved() == torch.vgpu.memory_reserved() == 20 * MIB
    del x
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 0
    assert torch.accelerator.max_memory_reserved() == 20 * MIB
    assert f"reserved_bytes.all.peak: {20 * MIB:,}" in torch.vgpu.memory_summary(0)


def test_requested_bytes_are_not_rounded():
    def requested():
        stats = torch.vgpu.memory_stats()
        return [stats[f"requested_bytes.all.{which}"] for which in ("current", "peak")]

    torch.vgpu.reset_peak_memory_stats()
    before, _ = requested()
    x = torch.zeros(100, dtype=torch.uint8, device="vgpu")
    assert requested() == [before + 100, before + 100]
    x.untyped_storage().resize_(700)
    assert requested() == [before + 700, before + 700]
    del x
    assert requested() == [before, before + 700]
    torch.vgpu.reset_peak_memory_stats()
    assert requested() == [before, before]


def test_streams_share_no_segments():
    with torch.vgpu.stream(torch.vgpu.Stream("vgpu:0")):
        x = of(5)
    del x
    y = of(5)
    assert reserved_mib() == 40
    del y


def test_cached_segments_are_released_before_memory_runs_out():
    x = of(200)
    del x
    y = of(100)  # in the 200 MiB segment, which can't be released while y is in it
    assert reserved_mib() == 200
    z = of(156)
    assert torch.vgpu.memory_allocated() == 256 * MIB
    counts = ["num_alloc_retries", "num_ooms"]
    assert [torch.vgpu.memory_stats()[name] for name in counts] == [1, 0]
    for _ in range(2):  # each time, it retries and gives up
        with pytest.raises(torch.OutOfMemoryError):
            of(1)
    assert [torch.vgpu.memory_stats()[name] for name in counts] == [3, 2]
    del y, z
    vgpu.disable()
    with vgpu.enable(1):
        assert [torch.vgpu.memory_stats()[name] for name in counts] == [0, 0]


def test_reserved_bytes_exceed_capacity_where_cuda_would_run_out():
    parts = [of(20) for _ in range(12)]
    del parts[::2]
    x = of(130)  # while 120 MiB are in use
    assert (torch.vgpu.memory_allocated() // MIB, reserved_mib()) == (250, 250)
    y = of(4)  # there's no room for a 20 MiB segment
    assert (torch.vgpu.memory_allocated() // MIB, reserved_mib()) == (254, 270)
    assert torch.vgpu.mem_get_info() == (0, 256 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"this process has 256\.00 MiB memory in use"):
        of(10)
    del x, y


def test_reenabled_gpus_count_only_memory_still_held():
    x, y = of(5), of(30)
    del y
    with vgpu.enable(1, memory_bytes=512 * MIB):
        assert reserved_mib() == 50
        assert torch.vgpu.mem_get_info() == (462 * MIB, 512 * MIB)
    vgpu.disable()
    vgpu.enable(2, memory_bytes=256 * MIB)
    assert (reserved_mib(), torch.vgpu.max_memory_reserved()) == (20, 20 * MIB)
    assert x.numel() == 5 * MIB


def some_program(ask, seed=0):
    """Create, resize and free blocks at random on two streams, with a query after each step."""
    chance, side, live = random.Random(seed), torch.vgpu.Stream("vgpu:0"), []
    for _ in range(300):
        kind = chance.random()
        if kind < 0.5 and len(live) < 12:
            with torch.vgpu.stream(side if chance.random() < 0.3 else None):
                live.append(of(chance.choice([0, 0.001, 0.3, 1, 3, 9, 14])))
        elif live and kind < 0.6:
            chance.choice(live).untyped_storage().resize_(chance.choice([0, MIB // 2, 11 * MIB]))
        elif live:
            live.pop(chance.randrange(len(live)))
        ask()
    return live


@pytest.mark.parametrize("longest_log", [8, 2**21])
@pytest.mark.parametrize("shapes", [False, True])
def test_reserved_bytes_equal_those_replayed_from_a_record(longest_log, shapes, monkeypatch):
    monkeypatch.setattr(caching_allocator, "_LONGEST_LOG", longest_log)
    asked = []
    mode = vgpu.shapes_only() if shapes else torch.no_grad()
    with mode, vgpu.record_memory() as record:
        live = some_program(lambda: asked.append(torch.vgpu.memory_reserved()))
        replayed = record.reserved("vgpu:0")
    assert torch.vgpu.memory_reserved() == asked[-1] == replayed.reserved_bytes
    assert torch.vgpu.max_memory_reserved() == max(asked) == replayed.peak_reserved_bytes
    assert len(set(asked)) > 5
    del live


def test_the_allocator_survives_frees_during_an_allocation(monkeypatch):
    """Creating an object may trigger garbage collection, whose finalizers may do anything."""
    held, made = [of(3), of(9)], []

    class Block(memory.Block):
        def __init__(self, *args):
            super().__init__(*args)
            if held:
                held.pop()
                made.append(of(12))

    monkeypatch.setattr(memory, "Block", Block)
    kept = of(30)
    assert torch.vgpu.memory_allocated() == (12 + 12 + 30) * MIB
    assert reserved_mib() == 20 + 12 + 30  # one 12 MiB block is where the first two were
    made.clear()
    assert torch.vgpu.memory_allocated() == 30 * MIB
    torch.vgpu.empty_cache()
    assert reserved_mib() == 30 and kept.numel() == 30 * MIB
