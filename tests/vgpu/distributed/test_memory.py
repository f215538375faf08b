"""A model whose replicas run out of a GPU's memory trains there once it is sharded."""

import pytest
from cells import cell

from helpers import launch

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
