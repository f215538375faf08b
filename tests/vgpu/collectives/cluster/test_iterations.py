"""One iteration of DataParallel and of DDP: what overlaps, what waits, and what it costs."""

import pytest
from torch import nn

import vgpu


def make_model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)])


@pytest.mark.parametrize("count", [2, 4])
def test_ddp_overlaps_communication_and_data_parallel_serializes_it(count):
    sizes = ((64 * count, 512), (64 * count, 512))
    with vgpu.enable(count):
        replicated = vgpu.data_parallel_iteration(make_model, *sizes, count)
        ranks = vgpu.ddp_iteration(make_model, *sizes, count)
    assert ranks.makespan_s < replicated.makespan_s
    reduces = [e for e in ranks.of("vgpu:0") if e.kind == "collective"]
    backward = [e for e in ranks.of("vgpu:0") if e.backward]
    assert len(reduces) == 2  # a bucket of 1 MiB, and one of at most 25 MiB
    assert reduces[0].start_s < backward[-1].end_s  # during the backward pass
    assert sum(e.size_bytes for e in reduces) == 12 * (512 * 512 + 512) * 4
    updates = [e for e in ranks.of("vgpu:0") if e.name == "_foreach_add_" and not e.backward]
    assert updates[0].start_s >= reduces[-1].end_s
    assert [len(ranks.of(d)) for d in ranks.devices] == [len(ranks.of("vgpu:0"))] * count


def test_data_parallel_broadcasts_and_reduces_as_nccl_does():
    sizes = ((256, 512), (256, 512))
    with vgpu.enable(4):
        timeline = vgpu.data_parallel_iteration(make_model, *sizes, 4)
    parameter_bytes = 12 * (512 * 512 + 512) * 4
    for name in ("broadcast", "reduce"):
        by_gpu = [[e for e in timeline.of(d) if e.name == name] for d in timeline.devices]
        assert all(sum(e.size_bytes for e in each) == parameter_bytes for each in by_gpu)
        assert len(by_gpu[0]) == 2  # buffers of 10 MiB
        times = [[(e.start_s, e.end_s) for e in each] for each in by_gpu]
        assert times[0] == times[1] == times[2] == times[3]
    rate = 150e9 * 0.8  # NVLink 2, at its assumed share
    duration_s = by_gpu[0][0].duration_s
    assert duration_s == pytest.approx(by_gpu[0][0].size_bytes / rate + 3 * 5e-6)


def test_data_parallel_on_some_of_the_gpus_is_replayed_on_the_same_ones():
    with vgpu.enable(4):
        timeline = vgpu.data_parallel_iteration(make_model, (64, 512), (64, 512), 2)
    assert [str(device) for device in timeline.devices] == ["vgpu:0", "vgpu:1"]
    assert vgpu.replay(timeline) == timeline


def test_the_ddp_iteration_rejects_unequal_shares():
    with vgpu.enable(1), pytest.raises(ValueError, match="3 ranks can't share 64 samples"):
        vgpu.ddp_iteration(make_model, (64, 512), (64, 512), 3)
