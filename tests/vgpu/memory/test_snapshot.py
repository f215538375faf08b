"""Memory snapshots have torch.cuda.memory._snapshot's format, and PyTorch's viewer reads them."""

import pickle

import pytest
import torch
from torch.cuda import _memory_viz

import vgpu
from vgpu.memory import blocks, snapshot

pytestmark = pytest.mark.virtual_gpus(2)

MIB = 2**20


@pytest.fixture
def history():
    snapshot.record_history()
    yield
    snapshot.record_history(None)


def make_weight():
    return torch.empty(30 * MIB, dtype=torch.uint8, device="vgpu:0")


def test_a_snapshot_has_each_block_and_the_stack_that_allocated_it(history):
    weight, small = make_weight(), torch.empty(3, device="vgpu:1")
    taken = torch.vgpu.memory._snapshot()
    large, little = sorted(taken["segments"], key=lambda each: each["device"])
    assert (large["total_size"], large["allocated_size"]) == (30 * MIB, weight.nbytes)
    assert (little["total_size"], little["segment_type"]) == (2 * MIB, "small")
    (block,) = large["blocks"]
    assert block["state"] == "active_allocated" and block["size"] == weight.nbytes
    innermost = block["frames"][0]
    assert innermost["name"] == "make_weight" and innermost["filename"] == __file__
    assert [block["state"] for block in little["blocks"]] == ["active_allocated", "inactive"]
    assert little["blocks"][0]["size"] == 512 == small.untyped_storage().nbytes() + 500


def test_a_snapshot_distinguishes_requested_from_allocated_bytes(history):
    x = torch.empty(11 * MIB, dtype=torch.uint8, device="vgpu:0")  # the last MiB isn't split off
    (segment,) = (each for each in torch.vgpu.memory._snapshot()["segments"] if each["device"] == 0)
    (block,) = segment["blocks"]
    assert (block["size"], block["requested_size"]) == (12 * MIB, x.nbytes)
    assert (segment["allocated_size"], segment["requested_size"]) == (12 * MIB, x.nbytes)


def test_the_history_has_segments_allocations_and_releases_in_order(history):
    weight = make_weight()
    del weight
    again = make_weight()
    trace, other = torch.vgpu.memory._snapshot()["device_traces"]
    assert [entry["action"] for entry in trace] == [
        *("segment_alloc", "alloc", "free_requested", "free_completed", "alloc")
    ]
    assert len({entry["addr"] for entry in trace}) == 1 and other == []
    assert again.nbytes == trace[-1]["size"]


def test_a_growing_storage_is_reallocated_then_released(history):
    x = torch.empty(MIB, dtype=torch.uint8, device="vgpu:0")
    x.untyped_storage().resize_(3 * MIB)
    trace = torch.vgpu.memory._snapshot()["device_traces"][0]
    changes = [
        (entry["action"], entry["size"] // MIB) for entry in trace if "seg" not in entry["action"]
    ]
    expected = [("alloc", 1), ("alloc", 3), ("free_requested", 1), ("free_completed", 1)]
    assert changes == expected


def test_pytorchs_viewer_reads_a_snapshot(history):
    kept = [make_weight() for _ in range(3)]
    del kept[1]
    taken = torch.vgpu.memory._snapshot()
    summary = _memory_viz.segsum(taken)
    assert "segments: 3" in summary and "total_allocated: 60.0MiB" in summary
    assert _memory_viz.trace(taken).count("cudaMalloc") == 3
    lines = _memory_viz.memory(taken, format_flamegraph=lambda text: text).splitlines()
    assert sum("make_weight" in line and line.endswith(str(30 * MIB)) for line in lines) == 2
    assert "<!DOCTYPE html>" in _memory_viz.trace_plot(taken)


def test_a_snapshot_without_a_history_has_segments_and_no_frames():
    weight = make_weight()
    taken = torch.vgpu.memory._snapshot()
    (segment,) = (each for each in taken["segments"] if each["allocated_size"])
    assert segment["allocated_size"] == weight.nbytes and taken["device_traces"] == [[], []]
    assert segment["blocks"][0]["frames"] == []


def test_a_full_history_keeps_its_latest_entries():
    torch.vgpu.memory._record_memory_history(max_entries=2)
    kept = [make_weight() for _ in range(3)]
    trace = torch.vgpu.memory._snapshot()["device_traces"][0]
    assert len(trace) == 2 and len(kept) == 3
    torch.vgpu.memory._record_memory_history(enabled=None)
    assert torch.vgpu.memory._snapshot()["device_traces"] == [[], []]


def test_a_dumped_snapshot_is_a_pickle(history, tmp_path):
    weight = make_weight()
    torch.vgpu.memory._dump_snapshot(tmp_path / "snapshot.pickle")
    taken = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert taken["segments"][0]["allocated_size"] == weight.nbytes


def test_disabled_virtual_gpus_record_no_history():
    with vgpu.enable(1):
        torch.vgpu.memory._record_memory_history()
    with vgpu.enable(1):
        vgpu.disable()
        assert not blocks._records
