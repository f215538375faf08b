"""Bytes by cause add up to what the device counts."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vgpu
from helpers import devices
from vgpu.profiling import memory


@pytest.fixture
def gpus():
    yield devices.lab(2)
    vgpu.disable()


def test_causes_add_up_to_allocated_bytes(gpus):
    known = torch.ones(1024, device=gpus[0])
    unknown = torch.ones(256, device=gpus[0])
    named = {"known": [known, known[:], known.view(2, -1)], "named again": [known]}
    seen = memory.snapshot("now", gpus, named)
    wanted = {"known": known.nbytes, "named again": 0, memory.OTHER: unknown.nbytes}
    assert seen.by_cause[gpus[0]] == wanted
    assert seen.total_bytes(gpus[0]) == torch.get_device_module(gpus[0]).memory_allocated(gpus[0])
    assert seen.total_bytes(gpus[1]) == 0


def test_a_snapshot_has_the_peak_since_the_previous_one(gpus):
    memory.snapshot("before", gpus, {})
    torch.ones(1024, device=gpus[0]).add(1)
    first = memory.snapshot("first", gpus, {})
    second = memory.snapshot("second", gpus, {})
    assert first.peak_bytes == {gpus[0]: 8192, gpus[1]: 0}
    assert second.peak_bytes == {gpus[0]: 0, gpus[1]: 0}


def test_peaks_cover_only_the_step(gpus):
    kept = torch.ones(10_000, device=gpus[0])
    torch.ones(20_000, device=gpus[0])  # freed before the step, whose peak is lower

    def step():
        first = torch.ones(1024, device=gpus[0])
        del first
        torch.ones(512, device=gpus[1])

    assert memory.peaks_during(step, gpus) == [4096, 2048]
    assert kept.sum().item() == 10_000


@pytest.fixture
def step():
    """A small model on one GPU, with what its training step needs."""
    (gpu,) = devices.lab(1)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    model = nn.Sequential(*layers).to(gpu)
    yield gpu, model, torch.randn(256, 64, device=gpu)
    vgpu.disable()


def record_of(model, x, optimizer=None):
    with memory.StepRecord(model, optimizer, [x]) as record:
        loss = model(x).sum()
        record.phase("backward")
        loss.backward()
        if optimizer:
            record.phase("update")
            optimizer.step()
    return record


def test_a_record_matches_the_counter_and_its_peak(step):
    gpu, model, x = step
    elsewhere = torch.ones(5000, device=gpu)
    module = torch.get_device_module(gpu)
    module.reset_peak_memory_stats(gpu)
    record = record_of(model, x)
    others = 20_480  # 20,000 bytes of floats, rounded up to 512
    assert record.peak.total_bytes + others == module.max_memory_allocated(gpu)
    assert elsewhere.numel() == 5000


def test_causes_of_a_record_match_a_hand_calculation(step):
    _, model, x = step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    without_state = record_of(model, x, optimizer).moments[0].by_cause["optimizer state"]
    model.zero_grad()
    record = record_of(model, x, optimizer)
    sizes = sum(parameter.nbytes for parameter in model.parameters())
    last = record.moments[-1].by_cause
    assert last["parameters"] == last["gradients"] == last["optimizer state"] == sizes
    assert without_state == 0 and record.moments[0].by_cause["gradients"] == 0
    assert all(moment.by_cause["inputs"] == x.nbytes for moment in record.moments)
    at_loss = [moment for moment in record.moments if moment.phase == "forward"][-1]
    # The outputs of the ReLUs, and the loss itself.
    output = 256 * 128 * 4
    assert at_loss.activations_by_module == {"1": output, "3": output, "": 512}
    assert [record.moments[-1].by_cause[c] for c in ("activations", "temporary")] == [512, 0]
    assert {moment.phase for moment in record.moments} == {"forward", "backward", "update"}


def test_gradients_count_once_even_if_no_phase_is_named(step):
    """Without phases, a gradient is first an activation, until it's a parameter's ``.grad``."""
    _, model, x = step
    with memory.StepRecord(model, inputs=[x]) as record:
        model(x).sum().backward()
    assert record.moments[-1].by_cause["gradients"] > 0
    assert all(moment.by_cause["temporary"] >= 0 for moment in record.moments)


def test_recomputed_activations_belong_to_the_checkpointed_modules(step):
    _, model, x = step
    with memory.StepRecord(model, inputs=[x]) as record:
        loss = checkpoint(model, x, use_reentrant=False).sum()
        loss = loss * 1  # after this, the model's output is gone
        record.phase("backward")
        loss.backward()
    forward = [moment for moment in record.moments if moment.phase == "forward"]
    again = [moment for moment in record.moments if moment.phase == "backward"]
    assert forward[-1].activations_by_module == {"": 1024}
    assert max(moment.activations_by_module.get("1", 0) for moment in again) == 256 * 128 * 4


def test_a_record_leaves_no_hook_and_keeps_no_tensor_alive(gpus):
    gpu = gpus[0]
    model = nn.Linear(64, 64).to(gpu)
    optimizer = torch.optim.Adam(model.parameters())
    record = record_of(model, torch.randn(32, 64, device=gpu), optimizer)
    assert not model._forward_pre_hooks and not model._forward_hooks
    del model, optimizer
    assert torch.get_device_module(gpu).memory_allocated(gpu) == 0 and record.peak.total_bytes > 0


def test_capacity_limits_one_gpu_and_does_not_change_its_model():
    with vgpu.enable(2, gpu="A100", link="PCIe 4"), pytest.raises(ZeroDivisionError):
        before = [torch.vgpu.mem_get_info(index) for index in range(2)]
        with memory.capacity(torch.device("vgpu:1"), 2**30):
            with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 1\.00 GiB"):
                torch.empty(2**30, device="vgpu:1")
            assert torch.vgpu.mem_get_info(0) == before[0]
            assert torch.vgpu.mem_get_info(1) == (2**30, 2**30)
            assert "A100" in torch.vgpu.get_device_name(1)
            with vgpu.record() as timeline:
                torch.ones(1, device="vgpu:0").to("vgpu:1")
            assert timeline.programs[0].costs.link.name == "PCIe 4.0 x16"
            _ = 1 / 0
    with vgpu.enable(2, gpu="A100"):
        assert torch.vgpu.mem_get_info(1) == before[1]
    none = memory.capacity(torch.device("vgpu:0"), 0)
    with vgpu.enable(1), pytest.raises(ValueError, match="got 0 for vgpu:0"), none:
        pass


def test_garbage_from_before_a_step_does_not_lower_its_peak(gpus):
    cycle = [torch.ones(10_000, device=gpus[0])]
    cycle.append(cycle)
    del cycle
    cycles = 2 * gc.get_threshold()[0]

    def step():
        kept = [[] for _ in range(cycles)]  # enough to trigger automatic garbage collection
        torch.ones(1024, device=gpus[0])
        assert kept

    assert memory.peaks_during(step, gpus) == [4096, 0]
    assert gc.isenabled()
    gc.collect()
