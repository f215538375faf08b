"""A lesson gets real GPUs if there are enough, and virtual ones otherwise."""

import os

import pytest
import torch

import vgpu
from helpers import devices


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("VGPU_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        os.environ.pop(name, None)
    yield
    vgpu.disable()


@pytest.fixture
def real_gpus(monkeypatch):
    """A function that pretends that this machine has ``count`` NVIDIA GPUs, for queries only."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Real GPU {index}")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**33, 2**34))

    return pretend


def test_lab_returns_virtual_gpus_if_there_are_no_real_ones(real_gpus):
    real_gpus(0)
    assert devices.lab(3) == [torch.device("vgpu", index) for index in range(3)]
    assert torch.ones(2, device="vgpu:2").device == torch.device("vgpu:2")
    assert "Virtual ones are used" in str(devices.describe(3))


def test_lab_returns_real_gpus_if_there_are_enough(real_gpus):
    real_gpus(2)
    assert devices.lab(2) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert "cuda:0 to cuda:1" in str(devices.describe(2))
    assert "Real GPU 1 (16 GiB)" in str(devices.describe(2))


def test_real_gpus_run_without_cublas_workspaces(real_gpus, monkeypatch):
    real_gpus(2)
    devices.lab(1)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "0"
    assert "only the bytes of tensors are counted" in str(devices.describe(2))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert "because CUBLAS_WORKSPACE_CONFIG=:4096:8 asks" in str(devices.describe(2))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_ranks_on_real_gpus_have_no_workspaces_even_if_the_lessons_gpus_are_virtual(real_gpus):
    real_gpus(2)
    devices.describe(4)  # the lesson's own GPUs are virtual; two ranks would have real ones
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"


def test_workspaces_are_not_mentioned_on_a_machine_without_gpus(real_gpus):
    real_gpus(0)
    assert "workspaces" not in str(devices.describe(2))
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_lab_returns_virtual_gpus_if_there_are_too_few_real_ones(real_gpus):
    real_gpus(1)
    assert devices.lab(2)[0].type == "vgpu"


def test_vgpu_devices_forces_virtual_gpus(real_gpus, monkeypatch):
    real_gpus(8)
    monkeypatch.setenv("VGPU_DEVICES", "vgpu")
    assert devices.lab(2)[1] == torch.device("vgpu:1")
    assert "VGPU_DEVICES=vgpu asks" in str(devices.describe(2))


def test_vgpu_devices_fails_if_real_gpus_are_missing(real_gpus, monkeypatch):
    real_gpus(1)
    monkeypatch.setenv("VGPU_DEVICES", "cuda")
    with pytest.raises(ValueError, match="needs 2 and this machine has 1"):
        devices.lab(2)


def test_describe_names_a_single_gpu_once(real_gpus):
    real_gpus(0)
    assert "1 virtual GPU (vgpu:0)" in str(devices.describe(1))


def test_vgpu_devices_rejects_an_unknown_value(monkeypatch):
    monkeypatch.setenv("VGPU_DEVICES", "tpu")
    with pytest.raises(ValueError, match="'tpu'; it can be auto, cuda, vgpu"):
        devices.lab(1)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True, None])
def test_lab_rejects_a_count_that_is_not_a_positive_int(count):
    with pytest.raises(ValueError, match="takes an integer of at least 1"):
        devices.lab(count)


def test_lab_returns_fewer_gpus_than_are_enabled_if_asked():
    devices.lab(8)
    assert devices.lab(2) == [torch.device("vgpu:0"), torch.device("vgpu:1")]
    assert torch.vgpu.device_count() == 8


def test_a_process_uses_only_one_kind_of_gpu(real_gpus):
    real_gpus(2)
    assert devices.lab(3)[0].type == "vgpu"
    assert devices.lab(1)[0].type == "vgpu"
    assert "already in use" in str(devices.describe(1))
