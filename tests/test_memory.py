"""Bytes by cause add up to what the device counts."""

import pytest
import torch

from helpers import devices, memory, vgpu


@pytest.fixture
def gpus():
    yield devices.lab(2)
    vgpu.disable()


def test_causes_add_up_to_what_is_allocated(gpus):
    known = torch.ones(1024, device=gpus[0])
    unknown = torch.ones(256, device=gpus[0])
    seen = memory.snapshot("now", gpus, {"known": [known, known[:], known.view(2, -1)]})
    assert seen.by_cause[gpus[0]] == {"known": known.nbytes, memory.OTHER: unknown.nbytes}
    assert seen.total_bytes(gpus[0]) == torch.get_device_module(gpus[0]).memory_allocated(gpus[0])
    assert seen.total_bytes(gpus[1]) == 0


def test_the_first_cause_that_names_a_tensor_has_it(gpus):
    tensor = torch.ones(1024, device=gpus[1])
    seen = memory.snapshot("now", gpus, {"first": [tensor], "second": [tensor]})
    assert seen.by_cause[gpus[1]]["first"] == 4096 and seen.by_cause[gpus[1]]["second"] == 0


def test_peaks_are_those_of_the_step_alone(gpus):
    kept = torch.ones(10_000, device=gpus[0])

    def step():
        first = torch.ones(1024, device=gpus[0])
        del first
        torch.ones(512, device=gpus[1])

    assert memory.peaks_during(step, gpus) == [4096, 2048]
    assert kept.sum().item() == 10_000
