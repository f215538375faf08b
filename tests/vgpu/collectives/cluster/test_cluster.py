"""One rank of a virtual cluster: its environment, and what it can't do."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from toy_cluster import toy

import vgpu
from vgpu.memory import gpus


def test_a_rank_gets_torchruns_environment():
    with toy(hosts=3, rank=6) as made:
        assert (dist.get_rank(), dist.get_world_size()) == (6, 12)
        assert made.device == torch.device("vgpu:2")
        assert torch.vgpu.current_device() == 2
        assert torch.empty(1, device="vgpu").device == made.device
        assert (os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("2", "12")
        assert "rank 6 of 12: 3 hosts with 4 A100-SXM4-40GB each, toy link inside" in str(made)
        mesh = init_device_mesh("vgpu", (3, 4), mesh_dim_names=("dp", "tp"))
        assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [2, 6, 10]
        assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [4, 5, 6, 7]


def test_leaving_a_cluster_restores_everything():
    before, enabled, excepthook = dict(os.environ), vgpu.is_enabled(), sys.excepthook
    with pytest.raises(KeyError), toy():
        raise KeyError
    assert not dist.is_initialized()
    assert sys.excepthook is excepthook  # torch's process group replaces it
    assert vgpu.is_enabled() == enabled
    assert dict(os.environ) == before
    assert gpus.current_index() == 0
    with vgpu.enable(1), vgpu.record() as timeline:
        torch.ones(1, device="vgpu")
    assert timeline.makespan_s > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 0}, "hosts must be at least 1, got 0"),
        ({"gpus_per_host": 0}, "gpus_per_host must be at least 1, got 0"),
        ({"rank": 8}, "rank must be from 0 to 7 for 2 hosts with 4 GPUs each, got 8"),
        ({"rank": -1}, "rank must be from 0 to 7"),
        ({"network": "pigeons"}, "no network preset 'pigeons': use one of InfiniBand EDR"),
    ],
)
def test_an_impossible_cluster_is_rejected(options, words):
    options = {"hosts": 2, "gpus_per_host": 4, **options}
    with pytest.raises(ValueError, match=words), vgpu.cluster(**options):
        pass
    assert not dist.is_initialized()


def test_out_of_memory_names_the_rank():
    words = r"out of memory.*on rank 5 of 8\."
    with toy(rank=5, memory_bytes=2**20), vgpu.shapes_only():
        with pytest.raises(torch.OutOfMemoryError, match=words):
            torch.empty(2**20, device="vgpu")
        dist.destroy_process_group()
        with pytest.raises(torch.OutOfMemoryError) as alone:
            torch.empty(2**20, device="vgpu")
    assert "rank" not in str(alone.value)


def test_an_existing_process_group_is_not_lost():
    with toy():
        with pytest.raises(RuntimeError, match="a process group already exists"), toy():
            pass
        assert dist.get_world_size() == 8


def test_integers_on_the_host_keep_their_values():
    with toy(), vgpu.shapes_only():
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.zeros(2, dtype=torch.int64).tolist() == [0, 0]
        assert vgpu.is_shape(torch.zeros(2))
        assert vgpu.is_shape(torch.arange(3).to("vgpu"))
