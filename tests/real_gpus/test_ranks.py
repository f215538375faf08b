"""Ranks with one real GPU each, over NCCL. The same tests also run on virtual GPUs, over vccl.

``make test-gpu`` sets REAL_GPUS; without it, the real half is skipped, so that ``make test`` gives
the same results on every machine.
"""

import os

import cloudpickle
import pytest
import strategies
import torch
import torch.distributed as dist
from strategies import data, sharded

from vgpu import launch

cloudpickle.register_pickle_by_value(strategies)
ASKED = os.environ.get("REAL_GPUS") == "1"


def on(kind, ranks):
    """Return a pytest parameter; real GPUs are skipped if too few or not requested."""
    lacking = kind == "real" and not (ASKED and torch.cuda.device_count() >= ranks)
    skip = pytest.mark.skipif(lacking, reason=f"needs make test-gpu and {ranks} or more real GPUs")
    return pytest.param(kind, ranks, marks=skip, id=f"{kind}-{ranks}")


def launched(monkeypatch, kind, ranks, function, *args):
    """Call ``launch.run`` on GPUs of this kind."""
    monkeypatch.setenv("VGPU_DEVICES", {"real": "cuda", "virtual": "vgpu"}[kind])
    return launch.run(function, ranks, *args, gpu="V100", timeout_s=110)


def meets(rank, world_size):
    device = torch.accelerator.current_accelerator()
    mine = torch.full((4,), float(rank + 1), device=device)
    total, first = mine.clone(), mine.clone()
    dist.all_reduce(total)
    dist.broadcast(first, src=0)
    everyone = torch.empty(4 * world_size, device=device)
    dist.all_gather_single(everyone, mine)
    part = torch.empty(4, device=device)
    dist.reduce_scatter_single(part, everyone)
    exchanged = torch.empty(world_size, device=device)
    dist.all_to_all_single(exchanged, torch.arange(world_size, device=device) + 10.0 * rank)
    found = [total, first, everyone, part, exchanged]
    return device.type, dist.get_backend_config(), [tensor.tolist() for tensor in found]


@pytest.mark.parametrize(
    ("kind", "ranks"), [on("virtual", 2), on("real", 1), on("real", 2), on("real", 4)]
)
def test_collectives_match_the_cpu_on_ranks_with_their_own_gpus(monkeypatch, kind, ranks):
    backend = {"real": "cuda:nccl", "virtual": "vgpu:vccl"}[kind]
    results = launched(monkeypatch, kind, ranks, meets)
    each = [float(rank + 1) for rank in range(ranks)]
    for rank, (device_type, config, (total, first, everyone, part, exchanged)) in enumerate(
        results
    ):
        assert backend in config and backend.startswith(device_type)
        assert total == [sum(each)] * 4 and first == [1.0] * 4
        assert everyone == [value for value in each for _ in range(4)]
        assert part == [ranks * each[rank]] * 4
        assert exchanged == [10.0 * other + rank for other in range(ranks)]


# What runs on two ranks; four real GPUs run everything that virtual GPUs are compared on.
FEW = [data.ddp, sharded.fsdp, sharded.fsdp_without_resharding]


@pytest.mark.parametrize(
    ("kind", "ranks", "group"),
    [
        pytest.param(*case.values, group, marks=case.marks, id=f"{case.id}-{group}")
        for case, group in [
            (on("virtual", 2), "few"),
            (on("real", 2), "few"),
            *((on("real", 4), group) for group in strategies.WAYS),
        ]
    ],
)
def test_training_matches_ranks_on_the_cpu(monkeypatch, kind, ranks, group):
    ways = FEW if group == "few" else strategies.WAYS[group]
    ranks = launched(monkeypatch, kind, ranks, strategies.both, ways)
    assert ranks[0].keys() == {way.__name__ for way in ways}
    for rank, results in enumerate(ranks):
        for name, (on_cpu, on_gpu) in results.items():
            assert len(on_gpu) == len(on_cpu) > 0 or rank > 0, f"{name} compared nothing"
            message = f"rank {rank}, {name}: {{}}".format
            torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-5, msg=message)


def one_stays_away(rank, world_size):
    if rank:
        dist.all_reduce(torch.ones(1, device=torch.accelerator.current_accelerator()))
        torch.accelerator.synchronize()


@pytest.mark.parametrize(("kind", "ranks"), [on("virtual", 2), on("real", 2)])
def test_the_error_for_a_hanging_collective_names_the_missing_rank(monkeypatch, kind, ranks):
    with pytest.raises(launch.RanksHung, match="rank 1 arrived, rank 0 never arrived"):
        launched(monkeypatch, kind, ranks, one_stays_away)
