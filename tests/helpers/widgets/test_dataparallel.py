"""The DataParallel explorers: how a batch is split, and the recorded steps of an iteration."""

import pytest
import torch
from torch import nn

import vgpu
from helpers import devices, plots
from helpers.widgets.dataparallel import (
    describe_shares,
    iteration_explorer,
    share_sizes,
    shares_explorer,
    show_parts,
    step_table,
)
from vgpu.profiling.memory import Snapshot

A, B = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def gpus():
    yield devices.lab(8)
    vgpu.disable()


def test_share_sizes_add_up_and_never_increase(gpus):
    for batch_size in range(1, 40):
        for count in (1, 2, 3, 8):
            sizes = share_sizes(batch_size, gpus[:count])
            assert len(sizes) == count and sum(sizes) == batch_size
            assert sizes == sorted(sizes, reverse=True)


def test_describe_shares_counts_the_idle_gpus(gpus):
    assert share_sizes(10, gpus) == [2, 2, 2, 2, 2, 0, 0, 0]
    assert describe_shares([2, 2, 0]).startswith("4 samples: 2 of 3 GPUs get work, 1 idle")
    assert describe_shares([2, 2]) == "4 samples: 2 of 2 GPUs get work."


def test_the_sliders_for_shares_redraw(gpus, monkeypatch):
    drawn = []
    monkeypatch.setattr("helpers.plots.share_bars", drawn.append)
    explorer = shares_explorer(gpus)
    batch_size, gpu_count = explorer.children[0].children
    batch_size.value = 33
    gpu_count.value = 4
    assert drawn == [[2, 2, 2, 2, 2, 0, 0, 0], [5, 5, 5, 5, 5, 5, 3, 0], [9, 9, 9, 6]]


@pytest.fixture
def steps():
    begin = {A: {"inputs": 2048, "outputs": 0}, B: {"inputs": 0, "outputs": 0}}
    end = {A: {"inputs": 0, "outputs": 1024}, B: {"inputs": 0, "outputs": 512}}
    return [
        Snapshot("1 begin", begin, {A: 2048, B: 0}),
        Snapshot("2 end", end, {A: 4096, B: 512}),
    ]


def test_step_table_lists_what_each_device_holds_and_what_changed(steps):
    assert step_table(steps, 1).rows == [(A, "inputs", "2 KiB", "+2 KiB")]
    assert step_table(steps, 2).rows == [
        (A, "inputs", "0 B", "-2 KiB"),
        (A, "outputs", "1 KiB", "+1 KiB"),
        (B, "outputs", "512 B", "+512 B"),
    ]


def test_the_slider_for_steps_redraws(steps, monkeypatch):
    drawn = []
    monkeypatch.setattr("helpers.plots.one_step", lambda step, most: drawn.append(step.step))
    (slider,) = iteration_explorer(steps).children[0].children
    slider.value = 2
    slider.value = 1
    assert drawn == ["1 begin", "2 end", "1 begin"]


@pytest.mark.virtual_gpus(2)
def test_show_parts_draws_the_sizes_that_the_replicas_saw(monkeypatch):
    shown = []
    monkeypatch.setattr("helpers.plots.style.display", shown.append)
    gpus = [torch.device("vgpu", 0), torch.device("vgpu", 1)]
    show_parts(nn.Linear(32, 10).to(gpus[0]), torch.randn(13, 32), gpus)
    (picture,) = shown
    assert "7 × 32 on vgpu:0, 6 × 32 on vgpu:1" in picture.alt
    assert "330 parameters" in picture.alt and "13 × 10 in total" in picture.alt
    # Where backward runs is a question that the lesson asks after this figure.
    assert "gradients" not in picture.alt
    show_parts(nn.Linear(32, 10).to(gpus[0]), torch.randn(13, 32), gpus, backward=True)
    assert "each GPU computes its own gradients" in shown[1].alt


def test_iteration_marks_the_peak_of_each_step(steps, monkeypatch):
    shown = []
    monkeypatch.setattr("helpers.plots.style.display", shown.append)
    plots.iteration(steps, at_the_peak={"outputs": 2048, "their gradient": 1024})
    # More than after either step: the peak occurs during the second step.
    assert "4 KiB at its peak" in shown[0].alt
    assert "holds outputs 2 KiB, their gradient 1 KiB, and 1 KiB of other tensors" in shown[0].alt
