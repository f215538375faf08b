"""Training on ranks with virtual GPUs, bit for bit what it is on the CPU, and on one process."""

import functools

import cloudpickle
import pytest
import strategies
import torch
from levels import ALL

from vgpu import launch

cloudpickle.register_pickle_by_value(strategies)

# Every third way of each group.
WAYS = {group: ways if ALL else ways[::3] for group, ways in strategies.WAYS.items()}
BY_BATCH = ("ddp", "fsdp", "hybrid_sharding", "fsdp_without_resharding")


@functools.cache
def results_of(group):
    """For each rank, what the ways of a group gave; all on one start of the ranks."""
    return launch.run(strategies.both, 4, WAYS[group], gpu="V100")


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, way.__name__) for group, ways in WAYS.items() for way in ways],
)
def test_a_strategy_gives_on_virtual_gpus_what_it_gives_on_the_cpu(group, name):
    ranks = [results[name] for results in results_of(group)]
    assert ranks[0][0], "rank 0 has something to compare"
    for rank, (on_cpu, on_gpu) in enumerate(ranks):
        assert len(on_cpu) == len(on_gpu)
        for position, (mine, other) in enumerate(zip(on_gpu, on_cpu, strict=True)):
            assert torch.equal(mine, other), f"rank {rank}, tensor {position}: {mine} != {other}"
    if name in BY_BATCH:
        wanted = strategies.beside_one_process(name)
        found = ranks[0][1][-len(wanted) :]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
