"""launch.run sends a cell's function to processes and returns its results."""

import os
import threading

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist
from cells import cell, run
from rights import needs_shared_memory

from vgpu import launch
from vgpu.launch import launcher


def test_results_are_in_rank_order_and_the_group_is_ready():
    results = run(
        """
        def main(rank, world_size, factor):
            total = torch.tensor([float(rank)])
            dist.all_reduce(total)
            return {"rank": rank, "total": total * factor, "backend": dist.get_backend()}
        """,
        3,
        10.0,
    )
    assert [r["rank"] for r in results] == [0, 1, 2]
    assert not dist.is_initialized()  # the parent joins no group
    assert all(torch.equal(r["total"], torch.tensor([30.0])) for r in results)
    if torch.cuda.device_count() < 3:
        assert {r["backend"] for r in results} == {"gloo"}


def test_no_function_starts_before_every_rank_has_joined():
    """A function may leave the group immediately, while other ranks are still connecting."""
    names = cell(
        """
        class Late:
            def __reduce__(self):
                return delay, ()

        def delay():
            plain = dist.init_process_group
            def init(*args, **kwargs):
                plain(*args, **kwargs)
                time.sleep(0.5 * int(os.environ["RANK"]))
                os.environ["JOINED"] = str(time.monotonic())
            dist.init_process_group = init

        def main(rank, world_size, late):
            return float(os.environ["JOINED"]), time.monotonic()
        """
    )
    joined_s, began_s = zip(*launch.run(names["main"], 2, names["Late"]()), strict=True)
    assert min(began_s) >= max(joined_s)


def test_names_used_by_a_function_are_sent_with_it():
    names = cell(
        """
        from dataclasses import dataclass

        @dataclass
        class Measure:
            rank: int
            value: torch.Tensor

        scale = torch.tensor(3.0)

        def scaled(x):
            return x * scale

        def make(offset):
            return lambda rank, world_size: Measure(rank, scaled(torch.tensor(rank + offset)))
        """
    )
    results = launch.run(names["make"](1.0), 2)
    assert [m.value.item() for m in results] == [3.0, 6.0]
    assert all(isinstance(m, names["Measure"]) for m in results)


def test_a_function_can_call_an_operator_by_its_torch_ops_name():
    def main(rank, world_size):
        return torch.ops.aten.add(rank, world_size)

    assert launch.run(main, 2) == [2, 3]


def test_ranks_run_the_latest_version_of_a_cell():
    assert run("def main(rank, world_size): return 'old'", 2) == ["old", "old"]
    assert run("def main(rank, world_size): return 'new'", 2) == ["new", "new"]


def test_ranks_get_torchruns_environment_and_their_share_of_threads(monkeypatch):
    monkeypatch.setenv("SET_IN_A_CELL", "yes")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")  # torch reads it on import
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SET_IN_A_CELL")
    results = run(
        """
        def main(rank, world_size, names):
            assert dist.get_debug_level() == dist.DebugLevel.INFO
            return [os.environ[n] for n in names], torch.get_num_threads(), os.getcwd()
        """,
        2,
        names,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for rank, (values, threads, folder) in enumerate(results):
        assert values == [str(rank), str(rank), "2", "2", "127.0.0.1", "yes"]
        assert threads == max(1, cores // 2)
        assert folder == os.getcwd()


def test_a_rank_can_create_its_own_group_from_the_environment():
    results = run(
        """
        def main(rank, world_size):
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            dist.barrier()
            return dist.get_world_size()
        """,
        2,
    )
    assert results == [2, 2]


def test_figures_and_large_tensors_can_be_returned():
    figure, tensor = run(
        """
        def main(rank, world_size):
            import matplotlib.pyplot as plt
            if rank == 1:
                return torch.ones(5_000_000)
            figure, axes = plt.subplots()
            axes.plot([1, 2, 4])
            return figure
        """,
        2,
    )
    assert list(figure.axes[0].lines[0].get_ydata()) == [1, 2, 4]
    assert tensor.sum() == 5_000_000
    plt.close(figure)


@needs_shared_memory
def test_a_ranks_data_loader_has_workers_and_a_dataset_from_a_cell():
    results = run(
        """
        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return torch.tensor(index**2)

        def main(rank, world_size):
            loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
            return [batch.tolist() for batch in loader]
        """,
        1,
    )
    assert results == [[[0, 1], [4, 9]]]


def test_two_threads_can_run_ranks_at_once():
    function = cell("def main(rank, world_size, name): return name, rank")["main"]
    results = {}

    def start(name):
        results[name] = launch.run(function, 2, name)

    threads = [threading.Thread(target=start, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [(name, 0), (name, 1)] for name in "ab"}


def test_each_rank_has_its_own_random_numbers():
    draws = run(
        """
        def main(rank, world_size):
            import random
            import numpy as np
            return random.random(), np.random.rand()
        """,
        2,
    )
    assert len(set(draws[0]) | set(draws[1])) == 4


@pytest.mark.parametrize(
    ("nprocs", "error", "phrase"),
    [
        (0, ValueError, "at least 1 rank; got 0"),
        (-2, ValueError, "at least 1 rank; got -2"),
        (2.0, TypeError, r"must be an int; got 2.0 \(float\)"),
        (True, TypeError, r"must be an int; got True \(bool\)"),
        ("2", TypeError, r"must be an int; got '2' \(str\)"),
        (100_000, ValueError, "100000 ranks are too many for .* cores.*Use at most"),
    ],
)
def test_run_rejects_impossible_numbers_of_ranks(nprocs, error, phrase):
    with pytest.raises(error, match=phrase):
        launch.run(print, nprocs)


def test_run_rejects_other_invalid_arguments():
    with pytest.raises(
        TypeError, match=r"first argument must be a function, as in launch.run\(train, 2\)"
    ):
        launch.run(4, print)
    with pytest.raises(ValueError, match="timeout_s must be a positive number"):
        launch.run(print, 2, timeout_s=0)


def test_the_error_for_an_unpicklable_function_names_the_cause():
    names = cell(
        """
        gate = threading.Lock()

        def main(rank, world_size):
            with gate:
                return rank
        """
    )
    with pytest.raises(TypeError, match=r"cannot send main .* the variable 'gate' that it uses"):
        launch.run(names["main"], 2)
    with pytest.raises(TypeError, match="because of argument 2 after the number of ranks"):
        launch.run(print, 2, "fine", threading.Lock())


def test_a_function_without_rank_and_world_size_is_rejected_before_ranks_start():
    message = r"calls main\(rank, world_size\), and main\(rank\) can't be called that way: too many"
    with pytest.raises(TypeError, match=message):
        run("def main(rank): return rank", 2)
    with pytest.raises(TypeError, match="missing a required argument: 'data'"):
        run("def main(rank, world_size, data): return rank", 2)
    assert run("def main(*places): return places", 1, "extra") == [(0, 1, "extra")]


@pytest.mark.parametrize(
    ("gpus", "nccl", "ranks", "expected"),
    [(0, True, 1, "cpu"), (2, True, 2, "cuda"), (2, True, 3, "cpu"), (2, False, 2, "cpu")],
)
def test_ranks_use_real_gpus_and_nccl_if_there_are_enough(monkeypatch, gpus, nccl, ranks, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    backend = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[expected]
    assert {job.backend for job in launcher._jobs(ranks, None)} == {backend}


def test_a_free_port_is_outside_the_ephemeral_range():
    assert 20_000 <= launcher.free_port() < 30_000
