"""Training on ranks with virtual GPUs, bit for bit what it is on the CPU, and on one process."""

import cloudpickle
import pytest
import strategies
import torch

from helpers import launch

cloudpickle.register_pickle_by_value(strategies)

BY_BATCH = ("ddp", "fsdp", "hybrid_sharding", "fsdp_without_resharding")


@pytest.mark.parametrize("way", strategies.WAYS, ids=lambda way: way.__name__)
def test_a_strategy_gives_on_virtual_gpus_what_it_gives_on_the_cpu(way):
    ranks = launch.run(strategies.both, 4, way, gpu="V100", timeout_s=110)
    for rank, (on_cpu, on_gpu) in enumerate(ranks):
        assert len(on_cpu) == len(on_gpu)
        assert on_cpu or rank, "rank 0 has something to compare"
        for position, (mine, other) in enumerate(zip(on_gpu, on_cpu, strict=True)):
            assert torch.equal(mine, other), f"rank {rank}, tensor {position}: {mine} != {other}"
    if way.__name__ in BY_BATCH:
        wanted = strategies.beside_one_process(way.__name__)
        found = ranks[0][1][-len(wanted) :]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
