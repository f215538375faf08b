"""Collectives on a rank of a virtual cluster: what's rejected, and how long the rest takes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from toy_cluster import EXACT, LINK, collectives, toy

import vgpu


def test_collectives_reject_tensors_with_values():
    with toy():
        with pytest.raises(RuntimeError, match=r"all_reduce got a tensor with values.*shapes_only"):
            dist.all_reduce(torch.ones(2, device="vgpu"))
        with pytest.raises(RuntimeError, match=r"[Nn]o backend"):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match=r"[Nn]o backend"):
            dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1]))
        with (
            vgpu.shapes_only(),
            pytest.raises(RuntimeError, match="all_reduce got a tensor on the"),
        ):
            dist.all_reduce(torch.empty(2))


MS = 1e-3
MEGABYTES_8 = 2_000_000  # float32 elements


@pytest.mark.parametrize(
    ("call", "milliseconds"),
    [
        # 6 steps within a host and 1 between hosts; 7/8 of the bytes at 4 × 0.5 GB/s, capped at 1
        # GB/s.
        (lambda x, parts: dist.all_gather_single(x, parts[0]), 0.016 + 7),
        (lambda x, parts: dist.reduce_scatter_single(parts[0], x), 0.016 + 7),
        (lambda x, parts: dist.all_gather(parts, parts[0].clone()), 0.016 + 7),
        (lambda x, parts: dist.reduce_scatter(parts[0], list(parts)), 0.016 + 7),
        # A ring takes 2 × 7.016 ms; a tree would take 2 (3 × 0.001 + 0.01) + 16 / 0.92 ms.
        (lambda x, parts: dist.all_reduce(x), 14.032),
        (lambda x, parts: dist.broadcast(x, 0), 0.016 + 8),
        (lambda x, parts: dist.reduce(x, 0), 0.016 + 8),
        # Half of the bytes go to the other host, at 0.5 GB/s.
        (lambda x, parts: dist.all_to_all_single(x, x.clone()), 0.010 + 8),
        (lambda x, parts: dist.all_to_all(parts, list(parts)), 0.010 + 8),
        (lambda x, parts: dist.gather(parts[0], list(parts)), 0.010 + 8),
        (lambda x, parts: dist.scatter(parts[0], list(parts)), 0.010 + 8),
        (lambda x, parts: dist.send(x, 1), 0.001 + 8),
        (lambda x, parts: dist.send(x, 4), 0.010 + 16),
        (lambda x, parts: dist.recv(x, 1), 0.001 + 8),
        (lambda x, parts: dist.barrier(), 2 * 0.013 + 2e-6 / 0.92),  # one byte, over a tree
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:barrier.*device under current context")
def test_collective_times_match_hand_calculations(call, milliseconds):
    with toy(), vgpu.shapes_only():
        x = torch.empty(MEGABYTES_8, device="vgpu")
        parts = list(torch.empty(8, MEGABYTES_8 // 8, device="vgpu").unbind())
        with vgpu.record(**EXACT) as timeline:
            call(x, parts)
        (event,) = collectives(timeline)
        assert event.duration_s == pytest.approx(milliseconds * MS, rel=1e-9)
        assert timeline.races == []


def test_a_group_within_a_host_uses_its_link():
    with toy(), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (2, 4), mesh_dim_names=("dp", "tp"))
        x = torch.empty(MEGABYTES_8, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            dist.all_reduce(x, group=mesh["tp"].get_group())
            dist.all_reduce(x, group=mesh["dp"].get_group())
    inside, between = collectives(timeline)
    assert (inside.link, inside.ranks) == ("toy link", (0, 1, 2, 3))
    assert inside.duration_s == pytest.approx((2 * 3 * 0.001 + 2 * 6) * MS)
    # Four such groups share the host's adapters, one per GPU.
    assert (between.link, between.ranks) == ("toy network", (0, 4))
    assert between.duration_s == pytest.approx((2 * 0.010 + 16) * MS)


def test_four_gpus_share_one_adapter():
    network = vgpu.Network("one", 0.5e9, 0.0, "made for this test", adapters_per_host=1)
    with vgpu.cluster(2, 4, gpu="A100", link=LINK, network=network), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (2, 4), mesh_dim_names=("dp", "tp"))
        x = torch.empty(MEGABYTES_8, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            dist.broadcast(x, 0, group=mesh["dp"].get_group())
    assert collectives(timeline)[0].duration_s == pytest.approx(64 * MS)


def test_a_wait_delays_only_later_work_on_the_current_stream():
    with toy(), vgpu.shapes_only():
        x = torch.empty(MEGABYTES_8, device="vgpu")
        y = torch.empty(MEGABYTES_8, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            work = dist.all_reduce(x, async_op=True)
            y.add_(1)
            work.wait()
            x.add_(1)
    (sent,) = collectives(timeline)
    beside, after = [event for event in timeline.events if event.kind == "kernel"]
    assert sent.start_s == beside.start_s == 0.0
    assert after.start_s == sent.end_s
    assert timeline.races == []


def test_a_missing_wait_is_a_race():
    with toy(), vgpu.shapes_only():
        x = torch.empty(MEGABYTES_8, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            dist.all_reduce(x, async_op=True)
            x.add_(1)
    (race,) = timeline.races
    assert (race.operation, race.other_operation) == ("add_", "all_reduce")


def test_functional_collectives_wait_when_their_results_are_used():
    with toy(), vgpu.shapes_only():
        x = torch.empty(8, 250_000, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            total = functional.all_reduce(x, "sum", dist.group.WORLD)
            gathered = functional.all_gather_single(x, 0, dist.group.WORLD)
            x + total
        assert gathered.shape == (64, 250_000)
    first, second = collectives(timeline)
    (added,) = [event for event in timeline.events if event.name == "add"]
    assert added.start_s == first.end_s
    assert second.start_s == first.end_s  # one after the other on the group's stream
    assert timeline.races == []
