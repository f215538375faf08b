"""A cluster's GPUs differ from those outside its block, although they have the same names."""

import contextlib
import gc
from concurrent import futures

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import vgpu

MIB = 2**20


@pytest.fixture(autouse=True)
def no_garbage_is_collected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def of(size_mib):
    return torch.empty(size_mib * MIB, dtype=torch.uint8, device="vgpu:0")


def counts():
    return torch.vgpu.memory_allocated(), torch.vgpu.max_memory_allocated()


def fsdp_in_a_cluster():
    """Return the bytes that an FSDP model with reference cycles leaves in a cluster."""
    with vgpu.cluster(hosts=1, gpus_per_host=2), vgpu.shapes_only():
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).to("vgpu")
        fully_shard(model)
        model(torch.empty(4, 1024, device="vgpu")).sum().backward()
        del model
        return torch.vgpu.memory_allocated()


def test_memory_left_by_a_cluster_does_not_count_on_other_gpus():
    with vgpu.enable(1):
        kept = of(3)
        of(2)
        assert fsdp_in_a_cluster() > 4 * MIB  # garbage that's still alive
        assert counts() == (3 * MIB, 5 * MIB)
        torch.vgpu.reset_peak_memory_stats()
        with vgpu.record_memory() as record:
            gc.collect()
        assert counts() == (3 * MIB, 3 * MIB)
        assert record.events == []
        del kept


def test_a_cluster_starts_with_no_allocated_bytes():
    with vgpu.enable(1):
        kept = of(3)
        for _ in range(2):
            fsdp_in_a_cluster()
            with vgpu.cluster(hosts=1, gpus_per_host=2):
                assert counts() == (0, 0)
        assert kept.numel() == 3 * MIB


def test_leaving_a_cluster_restores_gpus_and_random_state():
    with vgpu.enable(3, gpu="A100", memory_bytes=64 * MIB):
        torch.manual_seed(5)
        expected = torch.rand(4, device="vgpu:0")
        torch.manual_seed(5)
        with vgpu.cluster(hosts=2, gpus_per_host=8, gpu="H100"):
            torch.manual_seed(6)
            assert torch.vgpu.device_count() == 8
        assert torch.rand(4, device="vgpu:0").tolist() == expected.tolist()
        assert torch.vgpu.mem_get_info(2) == (64 * MIB, 64 * MIB)
        assert "A100" in torch.vgpu.get_device_name(0)
        assert torch.vgpu.device_count() == 3
    assert not vgpu.is_enabled()


def test_each_threads_current_device_is_restored_after_a_cluster():
    with vgpu.enable(4), futures.ThreadPoolExecutor(1) as other:
        streams = [torch.vgpu.Stream(1), torch.vgpu.Stream(3)]
        for stream in streams:
            torch.vgpu.set_stream(stream)
            other.submit(torch.vgpu.set_stream, stream).result()
        with vgpu.cluster(hosts=1, gpus_per_host=2, rank=1):
            assert torch.vgpu.current_stream().device_index == 1
            assert torch.vgpu.current_stream().stream_id == 0
            assert other.submit(torch.vgpu.current_device).result() == 0
        assert torch.vgpu.current_stream() == streams[1]
        assert torch.vgpu.current_stream(1) == streams[0]
        assert other.submit(torch.vgpu.current_stream).result() == streams[1]


@pytest.mark.parametrize("shapes", [False, True])
def test_tensors_on_two_hosts_cannot_be_mixed(shapes):
    with vgpu.enable(1):
        here = torch.ones(3, device="vgpu:0")
        block = vgpu.shapes_only() if shapes else contextlib.nullcontext()
        with vgpu.cluster(hosts=1, gpus_per_host=2), block:
            there = torch.ones(3, device="vgpu:0")
            words = r"add got tensors from two hosts: other, of size \[3\], is on vgpu:0"
            with pytest.raises(RuntimeError, match=words):
                here + there
            assert (here.cpu().to("vgpu:0") + there).shape == (3,)
        with pytest.raises(RuntimeError, match="one that has ended"):
            here + there
        assert (here + here).tolist() == [2, 2, 2]


def test_a_record_around_a_cluster_rejects_ambiguous_gpu_names():
    with vgpu.enable(1), vgpu.record_memory() as alone:
        with vgpu.cluster(hosts=1, gpus_per_host=2):
            of(4)
        assert alone.peak_bytes("vgpu:0") == 4 * MIB
        with vgpu.record_memory() as both:
            of(1)
            with vgpu.cluster(hosts=1, gpus_per_host=2):
                of(4)
        for ask in (both.peak_bytes, both.reserved, alone.reserved):
            with pytest.raises(ValueError, match="vgpu:0 is more than one GPU in this record"):
                ask("vgpu:0")
        assert both.peak_bytes("vgpu:1") == 0


def test_a_record_in_a_cluster_excludes_gpus_outside_it():
    with vgpu.enable(1):
        outside = of(1)
        with vgpu.cluster(hosts=1, gpus_per_host=2), vgpu.record_memory() as within:
            inside = of(4)
            del outside  # as the garbage collector may do at any time
            assert within.allocated_bytes("vgpu:0") == [4 * MIB]
            assert torch.vgpu.memory_allocated("vgpu:0") == 4 * MIB
        del inside
        assert torch.vgpu.memory_allocated("vgpu:0") == 0
