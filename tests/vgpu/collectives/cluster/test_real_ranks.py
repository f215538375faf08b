"""Real ranks and rank 0 of a virtual cluster have the same operations, bytes and times."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import vgpu
from vgpu import launch

RANKS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def mlp():
    return nn.Sequential(*(Block() for _ in range(3)))


def ddp(device):
    model = DistributedDataParallel(mlp().to(device), bucket_cap_mb=0.05)
    return lambda x: model(x).sum().backward()


def fsdp(device):
    model = mlp().to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return lambda x: model(x).sum().backward()


def fsdp_and_tensor_parallel(device):
    mesh = init_device_mesh("vgpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = mlp().to(device)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return lambda x: model(x).sum().backward()


def pipeline(device):
    rank = dist.get_rank()
    x = torch.empty(4, 64, device=device, requires_grad=rank > 0)
    module = Block().to(device)
    stage = PipelineStage(module, rank, RANKS, device, input_args=(x,), output_args=(module(x),))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)

    def step(x):
        inputs = (x,) if rank == 0 else ()
        target = {"target": x} if rank == RANKS - 1 else {}
        schedule.step(*inputs, **target, return_outputs=False)

    return step


STEPS = {step.__name__: step for step in (ddp, fsdp, fsdp_and_tensor_parallel, pipeline)}


def recorded(name, device):
    step, x = STEPS[name](device), torch.ones(16, 64, device=device)
    step(x)
    step(x)  # DDP has created its buckets
    with vgpu.record() as timeline:
        step(x)
    return timeline


def of_a_real_rank(rank, world_size, name):
    return recorded(name, torch.device("vgpu", rank))


def done(timeline, device):
    """Return what ran on a GPU, in launch order."""
    events = sorted(timeline.of(device), key=lambda event: event.launch_s)
    return [(e.kind, e.name, e.size_bytes, e.flop, e.module, e.backward) for e in events]


@pytest.mark.parametrize("name", STEPS)
def test_real_ranks_match_a_clusters_ranks(name):
    real = launch.run(of_a_real_rank, RANKS, name, gpu="A100")
    ranks = range(RANKS) if name == "pipeline" else [0]
    for rank in ranks:
        with vgpu.cluster(1, RANKS, gpu="A100", rank=rank) as made, vgpu.shapes_only():
            alone = recorded(name, made.device)
        assert done(real[rank], made.device) == done(alone, made.device)
        assert real[rank].races == alone.races == []
        assert real[rank].makespan_s == alone.makespan_s
    assert any(kind == "collective" for kind, *_ in done(alone, made.device))
