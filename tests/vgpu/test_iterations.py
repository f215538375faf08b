"""Seconds from datasheets: the roofline, links, collectives, and what is fitted."""

import pytest
import torch
from torch import nn

from helpers import vgpu
from helpers.vgpu.iterations import BUCKET_BYTES, FIRST_BUCKET_BYTES, buckets_of
from helpers.vgpu.timing.costs import Work, work_of

ATEN = torch.ops.aten


def test_the_longer_of_arithmetic_and_memory_counts():
    spec = vgpu.PRESETS["V100"]
    costs = vgpu.CostModel(spec, share_of_peak=0.5, kernel_s=0.0)
    flop = 10**12
    assert costs.kernel_time_s(Work(flop, 1, False)) == flop / 15.7e12 / 0.5
    assert costs.kernel_time_s(Work(flop, 1, True)) == flop / 125e12 / 0.5
    assert costs.kernel_time_s(Work(1, 9 * 10**9, True)) == pytest.approx(0.01 / 0.5)


def test_flops_and_bytes_of_a_matrix_product():
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    work = work_of(ATEN.mm.default, (a, b), {}, a @ b)
    assert work == Work(2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4), False)


def test_in_place_reads_and_writes_and_expanded_tensors_are_read_once():
    x = torch.ones(100)
    assert work_of(ATEN.add_.Tensor, (x, x), {}, x).size_bytes == 3 * 400
    row = torch.ones(10).expand(1000, 10)
    assert work_of(ATEN.sum.default, (row,), {}, torch.ones(())).size_bytes == 40 + 4


def test_half_precision_uses_tensor_cores():
    a = torch.ones(8, 8, dtype=torch.float16)
    assert work_of(ATEN.mm.default, (a, a), {}, a).on_tensor_cores


def test_ring_all_reduce():
    link = vgpu.Link("test", 1e9, 1e-6, "made for this test")
    costs = vgpu.CostModel(vgpu.PRESETS["V100"], link=link, share_of_peak=1.0)
    assert costs.all_reduce_time_s(4 * 10**6, 1) == 0
    # 2 (n - 1) steps, a quarter of the bytes in each
    assert costs.all_reduce_time_s(4 * 10**6, 4) == pytest.approx(6 * (1e-6 + 1e-3))


@pytest.mark.parametrize("name", vgpu.PRESETS)
def test_presets_have_a_link_and_a_source(name):
    spec = vgpu.PRESETS[name]
    assert spec.link in vgpu.LINKS.values() and spec.host_link in vgpu.LINKS.values()
    assert spec.source and spec.link.source
    # A byte from memory is nearer than one from another GPU, that one nearer than the host's.
    assert spec.memory_bandwidth_bytes_per_s > spec.link.bandwidth_bytes_per_s
    assert spec.link.bandwidth_bytes_per_s >= spec.host_link.bandwidth_bytes_per_s


def test_links_as_their_standards_print_them():
    found = {name: round(link.bandwidth_bytes_per_s / 1e9, 1) for name, link in vgpu.LINKS.items()}
    assert [found[f"PCIe {n}"] for n in (2, 3, 4, 5)] == [8.0, 15.8, 31.5, 63.0]
    assert [2 * found[f"NVLink {n}"] for n in (1, 2, 3, 4)] == [160, 300, 600, 900]


def test_fitting_finds_the_share_and_refuses_the_impossible():
    assert vgpu.fit_share_of_peak(lambda share: 1.5 / share, 6.0) == pytest.approx(0.25, rel=1e-4)
    with pytest.raises(ValueError, match="no share"):
        vgpu.fit_share_of_peak(lambda share: 1.5 / share, 1.0)


def test_buckets_start_with_the_last_parameters():
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])  # 4 MiB each
    buckets = buckets_of(model)
    assert [len(bucket) for bucket in buckets] == [1, 7, 7, 1]
    assert buckets[0][0] is model[15].weight and buckets[-1][0] is model[0].weight
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (2**20, 25 * 2**20)


def make_model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)])


@pytest.mark.parametrize("count", [2, 4])
def test_ddp_overlaps_and_data_parallel_serialises(count):
    sizes = ((64 * count, 512), (64 * count, 512))
    with vgpu.enable(count):
        replicated = vgpu.data_parallel_iteration(make_model, *sizes, count)
        ranks = vgpu.ddp_iteration(make_model, *sizes, count, bucket_bytes=2 * 2**20)
    assert ranks.makespan_s < replicated.makespan_s
    reduces = [e for e in ranks.of("vgpu:0") if e.kind == "collective"]
    backward = [e for e in ranks.of("vgpu:0") if e.backward]
    assert len(reduces) == 7
    assert reduces[0].start_s < backward[-1].end_s  # while the backward pass goes on
    assert sum(e.size_bytes for e in reduces) == 12 * (512 * 512 + 512) * 4
    updates = [e for e in ranks.of("vgpu:0") if e.name == "add_" and not e.backward]
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
    rate = 150e9 * 0.5  # NVLink 2, at half of its peak
    duration_s = by_gpu[0][0].duration_s
    assert duration_s == pytest.approx(by_gpu[0][0].size_bytes / rate + 3 * 5e-6)


def test_ddp_needs_equal_shares():
    with vgpu.enable(1), pytest.raises(ValueError, match="3 ranks cannot share 64 samples"):
        vgpu.ddp_iteration(make_model, (64, 512), (64, 512), 3)
