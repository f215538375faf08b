"""What ranks compute on: GPUs where each has one and NCCL is there, else the CPU. Where they meet."""

import random
import socket

import pytest
import torch
import torch.distributed as dist

import vgpu
from helpers.train import training
from vgpu.launch import launcher, machine


@pytest.mark.parametrize(
    ("gpus", "nccl", "ranks", "expected"),
    [(0, True, 1, "cpu"), (2, True, 2, "cuda"), (2, True, 3, "cpu"), (2, False, 2, "cpu")],
)
def test_what_ranks_compute_on_is_decided_in_one_place(monkeypatch, gpus, nccl, ranks, expected):
    vgpu.disable()  # what a test before this one may have left enabled
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "1")
    backend = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[expected]
    assert machine.device_type(ranks) == machine.device_type() == expected
    assert {job.backend for job in launcher._jobs(ranks, None)} == {backend}
    assert training._device(cpu=False) == torch.device("cuda:1" if expected == "cuda" else "cpu")
    assert training._device(cpu=True) == torch.device("cpu")
    assert chosen == [1] * (expected == "cuda")
    with vgpu.enable(ranks):
        assert machine.device_type() == "vgpu"


def test_a_free_port_is_none_that_is_given_to_others(monkeypatch):
    asked = []

    def sample(self, ports, count):
        asked.append((ports[0], ports[-1], count))
        return [taken.getsockname()[1], 29_999] if len(asked) == 1 else [taken.getsockname()[1]]

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert 20_000 <= machine.free_port() < 30_000
        monkeypatch.setattr(random.SystemRandom, "sample", sample)
        assert machine.free_port() == 29_999
        with pytest.raises(OSError, match="found no free port for the ranks"):
            machine.free_port()
    assert asked == [(20_000, 29_999, 100)] * 2
