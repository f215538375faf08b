"""PyTorch's own parallel code on one rank of a virtual cluster."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from toy_cluster import collectives, toy

import vgpu


def mlp(width=256):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))


def step(model, width=256, **changes):
    x = torch.empty(64, width, device="vgpu")
    model(x).sum().backward()
    with vgpu.record(**changes) as timeline:
        model(x).sum().backward()
    return timeline


def test_ddp_in_one_cluster_does_not_affect_the_next():
    """The next cluster's groups have the same names, and its gradients are freed once sent."""

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


@pytest.mark.parametrize("as_view", (False, True))
def test_ddp_overlaps_its_all_reduces_with_backward(as_view):
    with toy(), vgpu.shapes_only():
        model = DistributedDataParallel(
            mlp().to("vgpu"), bucket_cap_mb=0.3, gradient_as_bucket_view=as_view
        )
        timeline = step(model, python_launch_s=0.0, engine_launch_s=0.0)
        assert timeline.races == []
        sent = [event for event in collectives(timeline) if event.name == "all_reduce"]
        size_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
        assert sum(event.size_bytes for event in sent) == size_bytes
        backward = [e for e in timeline.events if e.kind == "kernel" and e.backward]
        assert any(e.start_s < sent[0].end_s and e.end_s > sent[0].start_s for e in backward)
        # DDP copies the gradients out of its buckets after the last all-reduce, unless they're views.
        copied = [e for e in backward if e.name == "copy" and e.start_s >= sent[-1].end_s]
        assert bool(copied) != as_view


def test_fsdp_prefetches_and_keeps_an_eighth_of_the_parameters():
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
        # Four blocks in forward, and all but the last again in backward; the root keeps that one
        # unsharded.
        assert names.count("all_gather") >= 7
        assert names.count("reduce_scatter") == 4
        gathered = [e for e in collectives(timeline) if e.name == "all_gather"]
        first, second = gathered[:2]
        work = [e for e in timeline.events if e.kind == "kernel" and e.stream == 0]
        computing = [e for e in work if e.name == "addmm"]
        assert second.start_s < computing[0].end_s  # overlaps with the next block's gather
        assert computing[0].start_s >= first.end_s
        assert (
            sum(e.size_bytes for e in collectives(timeline) if e.name == "reduce_scatter") == whole
        )


def test_tensor_parallelism_issues_one_all_reduce_per_pass():
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


def test_a_second_cluster_has_its_own_groups():
    """DTensor caches plans by mesh, and meshes can be equal for ranks with different groups."""
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


def collectives_so_far():
    from vgpu.time import recording

    return [e for e in recording.under_way.program.simulated().trace if e.kind == "collective"]


def test_fsdp_frees_gathered_parameters():
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
        # Two blocks at once, each gathered into a buffer and copied out, plus small activations.
        assert torch.vgpu.max_memory_allocated() - before < 4.5 * one_block
        assert torch.vgpu.memory_allocated() - before < 0.1 * one_block
