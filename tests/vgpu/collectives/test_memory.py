"""A model whose replicas run out of a GPU's memory trains there once it is sharded."""

import pytest
from cells import cell

from vgpu import launch

TRAIN = """
from torch.distributed.fsdp import fully_shard

def main(rank, world, sharded):
    device = torch.device("vgpu", rank)
    torch.manual_seed(rank)
    blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(8)]
    model = torch.nn.Sequential(*blocks).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    if sharded:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.vgpu.max_memory_allocated()
"""
LIMIT_BYTES = 6 * 2**20


def test_a_model_that_runs_out_of_memory_under_ddp_trains_under_fully_shard():
    # Parameters, gradients and Adam's two states: 16 bytes a parameter, 8 MiB on each GPU.
    with pytest.raises(launch.RankRaised, match=r"total capacity of 6\.00 MiB") as raised:
        launch.run(cell(TRAIN)["main"], 2, False, gpu="V100", memory_bytes=LIMIT_BYTES)
    assert "OutOfMemoryError" in str(raised.value)
    limited = launch.run(cell(TRAIN)["main"], 2, True, gpu="V100", memory_bytes=LIMIT_BYTES)
    roomy = launch.run(cell(TRAIN)["main"], 2, True, gpu="V100")
    assert limited == roomy, "the limit changes neither a loss nor a byte"
    replicas = launch.run(cell(TRAIN)["main"], 2, False, gpu="V100")
    for (losses, peak_bytes), (expected, needed_bytes) in zip(limited, replicas, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert peak_bytes < LIMIT_BYTES < needed_bytes


COLLECTIVES = """
import torch.distributed._functional_collectives as functional

def all_gather(part, whole):
    dist.all_gather_single(whole(), part)

def all_gather_of_a_list(part, whole):
    dist.all_gather([torch.empty_like(part) for _ in range(dist.get_world_size())], part)

def reduce_scatter(part, whole):
    dist.reduce_scatter_single(part, whole())

def all_reduce(part, whole):
    dist.all_reduce(whole())

def all_reduce_and_wait_later(part, whole):
    dist.all_reduce(whole(), async_op=True).wait()

def broadcast(part, whole):
    dist.broadcast(whole(), src=0)

def all_to_all(part, whole):
    dist.all_to_all_single(whole(), whole())

def functional_all_reduce(part, whole):
    functional.all_reduce(whole(), "sum", dist.group.WORLD).sum()

def main(rank, world):
    part = torch.ones(2**12, device=torch.device("vgpu", rank))
    allocated_bytes = lambda: torch.vgpu.memory_allocated(rank)
    whole = lambda: torch.ones(world * 2**12, device=part.device)
    before, left = allocated_bytes(), {}
    for collective in (
        all_gather, all_gather_of_a_list, reduce_scatter, all_reduce, all_reduce_and_wait_later,
        broadcast, all_to_all, functional_all_reduce,
    ):
        found = set()
        for _ in range(50):
            collective(part, whole)
            found.add(allocated_bytes() - before)
        left[collective.__name__] = found
    return left
"""


def test_what_a_collective_had_is_free_once_it_has_been_waited_for():
    """gloo's threads let go of it a moment later: each of these left bytes in one of five calls."""
    for left in launch.run(cell(COLLECTIVES)["main"], 4, gpu="V100"):
        assert left == {name: {0} for name in left}
