"""Seconds from datasheets: the roofline, links, collectives, and what is fitted."""

import pytest
import torch

from helpers import vgpu
from helpers.vgpu.timing import collectives
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


# A GPU that sends 1 GB/s and needs 1 µs for each message; 4 MB among 4 GPUs.
MILLISECONDS = {
    "all_reduce": 2 * 3 * (0.001 + 1),  # 2 (n - 1) steps, a quarter of the bytes in each
    "reduce_scatter": 3 * (0.001 + 1),
    "all_gather": 3 * (0.001 + 1),
    "broadcast": 3 * 0.001 + 4,  # all bytes pass each GPU, three hops behind each other
    "reduce": 3 * 0.001 + 4,
    "all_to_all": 0.001 + 3,  # a quarter to each of three others
    "send": 0.001 + 4,
}


@pytest.mark.parametrize("name", collectives.COLLECTIVES)
def test_collectives_by_hand(name):
    link = vgpu.Link("test", 1e9, 1e-6, "made for this test")
    costs = vgpu.CostModel(vgpu.PRESETS["V100"], link=link, share_of_peak=1.0)
    found_s = costs.collective_time_s(name, 4 * 10**6, 4)
    assert found_s == pytest.approx(MILLISECONDS[name] * 1e-3, rel=1e-12)
    assert costs.collective_time_s(name, 4 * 10**6, 1) == 0
    assert collectives.COLLECTIVES[name].source


def test_a_collective_that_is_not_in_the_table_is_refused():
    costs = vgpu.CostModel(vgpu.PRESETS["V100"])
    with pytest.raises(ValueError, match="no collective 'gossip'; there are all_reduce"):
        costs.collective_time_s("gossip", 1, 2)
    with pytest.raises(ValueError, match="broadcast among 0 GPUs"):
        costs.collective_time_s("broadcast", 1, 0)


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
