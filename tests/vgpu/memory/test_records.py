"""Memory records: numbered blocks and their streams, and what CUDA would reserve for them."""

import contextlib
import gc

import pytest
import torch

import vgpu

MIB = 2**20

pytestmark = pytest.mark.virtual_gpus(2, memory_bytes=256 * MIB)


@pytest.fixture(autouse=True)
def empty():
    gc.collect()
    yield
    gc.collect()


def of(size_mib, device="vgpu:0"):
    return torch.empty(int(size_mib * MIB), dtype=torch.uint8, device=device)


def test_an_allocation_and_its_release_share_a_number():
    old = of(1)
    with vgpu.record_memory() as record:
        x, y = of(2), of(3)
        del x
        z = of(4)
        del old, z
    told = [(e.block, e.size_bytes // MIB, e.block_bytes // MIB, e.stream) for e in record.events]
    assert told == [
        (0, 2, 2, 0),
        (1, 3, 3, 0),
        (0, -2, 0, 0),
        (2, 4, 4, 0),
        (3, -1, 0, None),  # from before the record
        (2, -4, 0, 0),
    ]
    assert y is not None


@pytest.mark.parametrize("shapes", [False, True])
def test_a_record_computes_reserved_bytes_with_values_and_with_shapes_only(shapes):
    with vgpu.shapes_only() if shapes else contextlib.nullcontext(), vgpu.record_memory() as record:
        a, b, c = of(30), of(30), of(30)
        del a, c
        d = of(40)
    plain, expandable = record.reserved("vgpu:0"), record.reserved("vgpu:0", True)
    assert (plain.peak_reserved_bytes, plain.segments) == (130 * MIB, 4)
    assert (expandable.peak_reserved_bytes, expandable.segments) == (100 * MIB, 1)
    for found in (plain, expandable):
        assert found.reserved_bytes == found.peak_reserved_bytes
        assert (found.allocated_bytes, found.peak_allocated_bytes) == (70 * MIB, 90 * MIB)
    lost_bytes = [one.peak_reserved_bytes - one.peak_allocated_bytes for one in (plain, expandable)]
    assert lost_bytes == [40 * MIB, 10 * MIB]
    assert record.reserved("vgpu:1").peak_reserved_bytes == 0
    del b, d


def test_blocks_belong_to_the_stream_on_which_they_were_allocated():
    side = torch.vgpu.Stream("vgpu:0")
    with vgpu.record_memory() as record:
        with torch.vgpu.stream(side):
            x = of(5)
            other = of(5, "vgpu:1")  # whose current stream is the default one
        del x
        y = of(5)
    assert [event.stream for event in record.events] == [side.stream_id, 0, side.stream_id, 0]
    # Two segments of 20 MiB on vgpu:0: the free part belongs to the side stream.
    assert record.reserved("vgpu:0").reserved_bytes == 40 * MIB
    assert record.reserved("vgpu:1").reserved_bytes == 20 * MIB
    del y, other


def test_a_growing_storage_moves_and_an_emptied_one_is_freed():
    with vgpu.record_memory() as record:
        x = of(12)
        x.untyped_storage().resize_(30 * MIB)  # copied: 12 and 30 MiB at the same time
        x.untyped_storage().resize_(0)
        y = of(30)  # in x's place
    found = record.reserved("vgpu:0")
    assert (found.reserved_bytes, found.allocated_bytes) == (42 * MIB, 30 * MIB)
    assert found.peak_allocated_bytes == 42 * MIB
    del x, y


def test_blocks_from_before_the_record_come_first():
    kept, gone = of(6), of(30)
    with vgpu.record_memory() as record:
        del gone
        new = of(29)  # reuses the 30 MiB block, which isn't split
    found = record.reserved("vgpu:0")
    assert (found.reserved_bytes, found.allocated_bytes) == (50 * MIB, 36 * MIB)
    assert found.segments == 2
    del kept, new


def test_a_record_predicts_reserved_bytes_on_a_gpu_of_another_size():
    with vgpu.record_memory() as record:
        x = of(30)
        del x
        y = of(40)
    assert record.reserved("vgpu:0").peak_reserved_bytes == 70 * MIB
    small = record.reserved("vgpu:0", capacity_bytes=64 * MIB)
    assert (small.peak_reserved_bytes, small.retries) == (40 * MIB, 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"40 MiB on vgpu:0, stream 0: of 39 MiB"):
        record.reserved("vgpu:0", capacity_bytes=39 * MIB)
    del y
