"""One rank of a cluster that does not exist: what it may send, what comes out, and when.

The toy: a GPU sends 1 GB/s and needs 1 µs a step inside its host; between hosts, 0.5 GB/s and 10 µs.
Kernels take no time but where a test says so.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from helpers import vgpu
from helpers.vgpu.device import gpus

# torch 2.13 renames collectives.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

LINK = vgpu.Link("toy link", 1e9, 1e-6, "made for this test")
NETWORK = vgpu.Network("toy network", 0.5e9, 10e-6, "made for this test")
EXACT = {
    "link_share": 1.0,
    "network_share": 1.0,
    "python_launch_s": 0.0,
    "engine_launch_s": 0.0,
    "kernel_s": 0.0,
}


def toy(hosts=2, gpus_per_host=4, **options):
    return vgpu.cluster(hosts, gpus_per_host, gpu="A100", link=LINK, network=NETWORK, **options)


# Renamed in torch 2.15.
all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def collectives(timeline):
    return [event for event in timeline.events if event.kind == "collective"]


def test_what_a_rank_is_told():
    with toy(hosts=3, rank=6) as made:
        assert (dist.get_rank(), dist.get_world_size()) == (6, 12)
        assert made.device == torch.device("vgpu:2")
        assert torch.vgpu.current_device() == 2
        assert torch.empty(1, device="vgpu").device == made.device
        assert (os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("2", "12")
        assert "rank 6 of 12: 3 hosts with 4 A100-SXM4-40GB each, toy link inside" in str(made)
        mesh = init_device_mesh("vgpu", (3, 4), mesh_dim_names=("dp", "tp"))
        assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [2, 6, 10]
        assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [4, 5, 6, 7]


def test_everything_is_put_back():
    before, enabled = dict(os.environ), vgpu.is_enabled()
    with pytest.raises(KeyError), toy():
        raise KeyError
    assert not dist.is_initialized()
    assert vgpu.is_enabled() == enabled
    assert dict(os.environ) == before
    assert gpus.current_index() == 0
    with vgpu.enable(1), vgpu.record() as timeline:
        torch.ones(1, device="vgpu")
    assert timeline.makespan_s > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 0}, "hosts must be at least 1, got 0"),
        ({"gpus_per_host": 0}, "gpus_per_host must be at least 1, got 0"),
        ({"rank": 8}, "rank must be 0 to 7 for 2 hosts with 4 GPUs each, got 8"),
        ({"rank": -1}, "rank must be 0 to 7"),
    ],
)
def test_a_cluster_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words), toy(**options):
        pass
    assert not dist.is_initialized()


def test_out_of_memory_names_the_rank():
    words = r"out of memory.*on rank 5 of 8\."
    with toy(rank=5, memory_bytes=2**20), vgpu.shapes_only():
        with pytest.raises(torch.OutOfMemoryError, match=words):
            torch.empty(2**20, device="vgpu")
        dist.destroy_process_group()
        with pytest.raises(torch.OutOfMemoryError) as alone:
            torch.empty(2**20, device="vgpu")
    assert "rank" not in str(alone.value)


def test_an_unknown_network_is_named():
    words = "no network preset 'pigeons'; there are InfiniBand EDR"
    with pytest.raises(ValueError, match=words), vgpu.cluster(2, network="pigeons"):
        pass


def test_a_process_group_that_exists_is_not_lost():
    with toy():
        with pytest.raises(RuntimeError, match="a process group exists already"), toy():
            pass
        assert dist.get_world_size() == 8


def test_a_mesh_larger_than_the_world():
    with toy(), pytest.raises(RuntimeError, match="32"):
        init_device_mesh("vgpu", (4, 8))


# What is sent


def test_values_are_not_sent():
    with toy():
        with pytest.raises(RuntimeError, match=r"all_reduce of a tensor with values.*shapes_only"):
            dist.all_reduce(torch.ones(2, device="vgpu"))
        with pytest.raises(RuntimeError, match=r"[Nn]o backend"):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match=r"[Nn]o backend"):
            dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1]))
        with vgpu.shapes_only(), pytest.raises(RuntimeError, match="all_reduce of a tensor on the"):
            dist.all_reduce(torch.empty(2))


MS = 1e-3
MEGABYTES_8 = 2_000_000  # elements of float32


@pytest.mark.parametrize(
    ("call", "milliseconds"),
    [
        # 6 steps inside and 1 between hosts, 7/8 of the bytes at 4 × 0.5 GB/s, but at most 1 GB/s.
        (lambda x, parts: dist.all_gather_into_tensor(x, parts[0]), 0.016 + 7),
        (lambda x, parts: dist.reduce_scatter_tensor(parts[0], x), 0.016 + 7),
        (lambda x, parts: dist.all_gather(parts, parts[0].clone()), 0.016 + 7),
        (lambda x, parts: dist.reduce_scatter(parts[0], list(parts)), 0.016 + 7),
        # The ring takes 2 × 7.016, a tree 2 (3 × 0.001 + 0.01) + 16 / 0.92.
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
def test_times_worked_out_by_hand(call, milliseconds):
    with toy(), vgpu.shapes_only():
        x = torch.empty(MEGABYTES_8, device="vgpu")
        parts = list(torch.empty(8, MEGABYTES_8 // 8, device="vgpu").unbind())
        with vgpu.record(**EXACT) as timeline:
            call(x, parts)
        (event,) = collectives(timeline)
        assert event.duration_s == pytest.approx(milliseconds * MS, rel=1e-9)
        assert timeline.races == []


def test_a_group_inside_a_host_uses_its_link():
    with toy(), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (2, 4), mesh_dim_names=("dp", "tp"))
        x = torch.empty(MEGABYTES_8, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            dist.all_reduce(x, group=mesh["tp"].get_group())
            dist.all_reduce(x, group=mesh["dp"].get_group())
    inside, between = collectives(timeline)
    assert (inside.link, inside.ranks) == ("toy link", (0, 1, 2, 3))
    assert inside.duration_s == pytest.approx((2 * 3 * 0.001 + 2 * 6) * MS)
    # Four such groups share the host's adapters: each GPU has one.
    assert (between.link, between.ranks) == ("toy network", (0, 4))
    assert between.duration_s == pytest.approx((2 * 0.010 + 16) * MS)


def test_every_gpu_multiplies_at_the_pace_of_the_slowest_of_all():
    with vgpu.cluster(hosts=16), vgpu.shapes_only():
        factor = torch.empty(16384, 16384, device="vgpu", dtype=torch.bfloat16)
        with vgpu.record(speed_spread=0.1, kernel_s=0.0) as step:
            factor @ factor
            factor.neg()
    alike, of_eight = (
        vgpu.replay(step, **costs) for costs in ({"speed_spread": 0}, {"slowest_of": 8})
    )
    (product, read), eight, (first, second) = (
        [event.duration_s for event in timeline.events if event.kind == "kernel"]
        for timeline in (step, of_eight, alike)
    )
    # 128 GPUs: 2.5946 standard deviations; 8: 1.4236. What is left is writing the result.
    assert 1 + 0.95 * 0.25946 < product / first < 1.25946
    assert 1 + 0.95 * 0.14236 < eight[0] / first < 1.14236
    assert read == eight[1] == second


def test_one_adapter_for_four_gpus_is_shared():
    network = vgpu.Network("one", 0.5e9, 0.0, "made for this test", adapters_per_host=1)
    with vgpu.cluster(2, 4, gpu="A100", link=LINK, network=network), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (2, 4), mesh_dim_names=("dp", "tp"))
        x = torch.empty(MEGABYTES_8, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            dist.broadcast(x, 0, group=mesh["dp"].get_group())
    assert collectives(timeline)[0].duration_s == pytest.approx(64 * MS)


def test_the_current_stream_waits_and_work_in_between_does_not():
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


def test_a_forgotten_wait_is_a_race():
    with toy(), vgpu.shapes_only():
        x = torch.empty(MEGABYTES_8, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            dist.all_reduce(x, async_op=True)
            x.add_(1)
    (race,) = timeline.races
    assert (race.operation, race.other_operation) == ("add_", "all_reduce")


def test_functional_collectives_wait_when_they_are_used():
    with toy(), vgpu.shapes_only():
        x = torch.empty(8, 250_000, device="vgpu")
        with vgpu.record(**EXACT) as timeline:
            total = functional.all_reduce(x, "sum", dist.group.WORLD)
            gathered = all_gather(x, 0, dist.group.WORLD)
            x + total
        assert gathered.shape == (64, 250_000)
    first, second = collectives(timeline)
    (added,) = [event for event in timeline.events if event.name == "add"]
    assert added.start_s == first.end_s
    assert second.start_s == first.end_s  # one after the other on the group's stream
    assert timeline.races == []


# PyTorch's own parallel code


def mlp(width=256):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))


def step(model, width=256, **changes):
    x = torch.empty(64, width, device="vgpu")
    model(x).sum().backward()
    with vgpu.record(**changes) as timeline:
        model(x).sum().backward()
    return timeline


def test_ddp_in_one_cluster_leaves_nothing_to_the_next():
    """Its groups' names are those of the next one, whose gradients are freed once they are sent."""

    def peak_bytes(wrap):
        with vgpu.cluster(hosts=1) as cluster, vgpu.shapes_only():
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to("vgpu")
            wrap(model)(torch.empty(1, 1024, device="vgpu")).sum().backward()
            return torch.vgpu.max_memory_allocated(cluster.device)

    def sharded(model):
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    alone = peak_bytes(sharded)
    peak_bytes(nn.parallel.DistributedDataParallel)
    assert peak_bytes(sharded) == alone


def test_an_error_after_the_cluster_is_shown_as_before():
    """torch's process group lets uncaught errors name their rank."""
    before = sys.excepthook
    with toy():
        pass
    assert sys.excepthook is before


def test_ddp_sends_its_buckets_while_it_computes():
    with toy(), vgpu.shapes_only():
        model = DistributedDataParallel(mlp().to("vgpu"), bucket_cap_mb=0.3)
        timeline = step(model, python_launch_s=0.0, engine_launch_s=0.0)
        assert timeline.races == []
        sent = [event for event in collectives(timeline) if event.name == "all_reduce"]
        size_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
        assert sum(event.size_bytes for event in sent) == size_bytes
        backward = [e for e in timeline.events if e.kind == "kernel" and e.backward]
        assert any(e.start_s < sent[0].end_s and e.end_s > sent[0].start_s for e in backward)
        # DDP copies the sums out of its buckets after the last one has come.
        copied = [e for e in backward if e.name == "copy" and e.start_s >= sent[-1].end_s]
        assert copied


def test_fsdp_gathers_ahead_and_holds_an_eighth():
    with toy(), vgpu.shapes_only():
        model = mlp().to("vgpu")
        whole = sum(p.numel() * 4 for p in model.parameters())
        for block in model:
            fully_shard(block)
        fully_shard(model)
        assert sum(p.to_local().numel() * 4 for p in model.parameters()) == whole / 8
        timeline = step(model, python_launch_s=0.0, engine_launch_s=0.0)
        assert timeline.races == []
        names = [event.name for event in collectives(timeline)]
        # Four blocks forward, and again backward but the last, which the root does not reshard.
        assert names.count("all_gather") >= 7
        assert names.count("reduce_scatter") == 4
        gathered = [e for e in collectives(timeline) if e.name == "all_gather"]
        first, second = gathered[:2]
        work = [e for e in timeline.events if e.kind == "kernel" and e.stream == 0]
        computing = [e for e in work if e.name == "addmm"]
        assert second.start_s < computing[0].end_s  # the next block's is under way meanwhile
        assert computing[0].start_s >= first.end_s
        assert (
            sum(e.size_bytes for e in collectives(timeline) if e.name == "reduce_scatter") == whole
        )


def test_tensor_parallel_sends_one_all_reduce_each_way():
    with toy(), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (2, 4), mesh_dim_names=("dp", "tp"))
        block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to("vgpu")
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        x = torch.empty(64, 256, device="vgpu", requires_grad=True)
        block(x).sum().backward()
        with vgpu.record() as timeline:
            y = block(x)
            forward = len(collectives_so_far())
            y.sum().backward()
        sent = collectives(timeline)
        assert [event.name for event in sent] == ["all_reduce", "all_reduce"]
        assert forward == 1
        assert {event.size_bytes for event in sent} == {64 * 256 * 4}
        assert timeline.races == []


def test_a_second_cluster_has_groups_of_its_own():
    """DTensor keeps plans for meshes, which are equal for ranks whose groups are not."""
    found = {}
    for rank in (0, 5):
        with toy(rank=rank) as made, vgpu.shapes_only():
            mesh = init_device_mesh("vgpu", (2, 4), mesh_dim_names=("dp", "tp"))
            block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(made.device)
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            with vgpu.record() as timeline:
                block(torch.empty(8, 64, device=made.device)).sum().backward()
            found[rank] = {event.ranks for event in collectives(timeline)}
    assert found == {0: {(0, 1, 2, 3)}, 5: {(4, 5, 6, 7)}}


# As in a process that launch has forked: what was imported before is hidden from gc.get_objects().
FROZEN = """
import functools, gc
import torch.distributed.tensor.parallel
from helpers.models import TransformerSizes
from helpers.parallel import Layout
from helpers.plan import Plan, predict
gc.freeze()
sizes = TransformerSizes(2, 64, 4, 4, 128, 256, sequence=32)
predict(Plan(sizes, Layout(2, 2, 2), sequence=32))
gc.unfreeze()
found = [f for f in gc.get_objects() if type(f) is functools._lru_cache_wrapper]
of_dtensor = [f for f in found if f.__module__.startswith("torch.distributed.tensor")]
print(len(of_dtensor), [f.__qualname__ for f in of_dtensor if f.cache_info().currsize])
"""


def test_no_plan_of_dtensor_of_a_frozen_process_outlives_a_cluster():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FROZEN], capture_output=True, text=True
    )
    count, kept = done.stdout.split(maxsplit=1)
    assert int(count) > 1 and kept.strip() == "[]", done.stderr


def collectives_so_far():
    from helpers.vgpu.timing import recording

    return [e for e in recording.under_way.clock.player.events if e.kind == "collective"]


def test_dtensor_is_a_shape():
    with toy(), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (8,))
        made = distribute_tensor(torch.empty(80, 4, device="vgpu"), mesh, [Shard(0)])
        assert made.to_local().shape == (10, 4)
        assert made.full_tensor().shape == (80, 4)
        assert str(made.device) == "vgpu:0"


def test_integers_on_the_host_keep_their_values():
    with toy(), vgpu.shapes_only():
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.zeros(2, dtype=torch.int64).tolist() == [0, 0]
        assert vgpu.is_shape(torch.zeros(2))
        assert vgpu.is_shape(torch.arange(3).to("vgpu"))


def test_fsdp_frees_what_it_has_gathered():
    with toy(), vgpu.shapes_only():
        model = mlp(512).to("vgpu")
        one_block = sum(p.numel() * 4 for p in model[0].parameters())
        for block in model:
            fully_shard(block)
        fully_shard(model)
        x = torch.empty(8, 512, device="vgpu")
        before = torch.vgpu.memory_allocated()
        torch.vgpu.reset_peak_memory_stats()
        with torch.no_grad():
            model(x)
        # Two blocks at once, each gathered into a buffer and copied out, and small activations.
        assert torch.vgpu.max_memory_allocated() - before < 4.5 * one_block
        assert torch.vgpu.memory_allocated() - before < 0.1 * one_block
