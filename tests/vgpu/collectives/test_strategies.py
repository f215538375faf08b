"""Training on ranks with virtual GPUs matches the CPU and a single process bit for bit."""

import functools

import cloudpickle
import pytest
import strategies
import torch
from cells import cell
from levels import ALL

from vgpu import launch

cloudpickle.register_pickle_by_value(strategies)

# Every third strategy of each group.
WAYS = {group: ways if ALL else ways[::3] for group, ways in strategies.WAYS.items()}
BY_BATCH = ("ddp", "fsdp", "hybrid_sharding", "fsdp_without_resharding")


@functools.cache
def results_of(group):
    """Return each rank's results for a group of strategies; the ranks are started only once."""
    return launch.run(strategies.both, 4, WAYS[group], gpu="V100")


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, way.__name__) for group, ways in WAYS.items() for way in ways],
)
def test_a_strategy_has_the_same_results_on_virtual_gpus_as_on_the_cpu(group, name):
    ranks = [results[name] for results in results_of(group)]
    assert ranks[0][0], "rank 0 has nothing to compare"
    for rank, (on_cpu, on_gpu) in enumerate(ranks):
        assert len(on_cpu) == len(on_gpu)
        for position, (mine, other) in enumerate(zip(on_gpu, on_cpu, strict=True)):
            assert torch.equal(mine, other), f"rank {rank}, tensor {position}: {mine} != {other}"
    if name in BY_BATCH:
        wanted = strategies.beside_one_process(name)
        on_gpu = ranks[0][1][-len(wanted) :]
        torch.testing.assert_close(on_gpu, wanted, rtol=1e-4, atol=1e-5)


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
    # Parameters, gradients and Adam's two states: 16 bytes per parameter, 8 MiB on each GPU.
    with pytest.raises(launch.RankRaised, match=r"total capacity of 6\.00 MiB") as raised:
        launch.run(cell(TRAIN)["main"], 2, False, gpu="V100", memory_bytes=LIMIT_BYTES)
    assert "OutOfMemoryError" in str(raised.value)
    limited = launch.run(cell(TRAIN)["main"], 2, True, gpu="V100", memory_bytes=LIMIT_BYTES)
    roomy = launch.run(cell(TRAIN)["main"], 2, True, gpu="V100")
    assert limited == roomy, "the limit must change no loss and no byte count"
    replicas = launch.run(cell(TRAIN)["main"], 2, False, gpu="V100")
    for (losses, peak_bytes), (expected, needed_bytes) in zip(limited, replicas, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert peak_bytes < LIMIT_BYTES < needed_bytes


JOIN = """
import contextlib
import vgpu

def main(rank, world, kind, recorded):
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(2, 1, bias=False).to(kind))
    x = torch.full((2, 2), rank + 1.0).to(kind)
    gradients = []
    with vgpu.record() if recorded else contextlib.nullcontext(), model.join():
        for _ in range(3 + rank):
            model.zero_grad()
            model(x).sum().backward()
            gradients.append(model.module.weight.grad.tolist())
    return gradients
"""


@pytest.mark.parametrize("recorded", [False, True])
def test_ddp_join_has_the_same_results_on_virtual_gpus_as_on_the_cpu(recorded):
    """A rank without data contributes zeros; C++ waits for all-reduce futures outside backward."""
    on_cpu = launch.run(cell(JOIN)["main"], 2, "cpu", False)
    on_gpu = launch.run(cell(JOIN)["main"], 2, "vgpu", recorded, gpu="V100", timeout_s=60)
    assert on_gpu == on_cpu
    assert [len(gradients) for gradients in on_gpu] == [3, 4]
