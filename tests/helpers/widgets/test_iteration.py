"""The explorer of lesson 05: back and forth through the recorded steps."""

import pytest
import torch
from torch import nn

from helpers import plots
from helpers.widgets.iteration import iteration_explorer, show_parts, step_table
from vgpu.profiling.memory import Snapshot

A, B = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def steps():
    begin = {A: {"inputs": 2048, "outputs": 0}, B: {"inputs": 0, "outputs": 0}}
    end = {A: {"inputs": 0, "outputs": 1024}, B: {"inputs": 0, "outputs": 512}}
    return [
        Snapshot("1 begin", begin, {A: 2048, B: 0}),
        Snapshot("2 end", end, {A: 4096, B: 512}),
    ]


def test_the_table_says_what_is_where_and_what_changed(steps):
    assert step_table(steps, 1).rows == [(A, "inputs", "2 KiB", "+2 KiB")]
    assert step_table(steps, 2).rows == [
        (A, "inputs", "0 B", "-2 KiB"),
        (A, "outputs", "1 KiB", "+1 KiB"),
        (B, "outputs", "512 B", "+512 B"),
    ]


@pytest.mark.parametrize("number", [0, 3])
def test_a_step_that_is_none_is_refused(steps, number):
    with pytest.raises(ValueError, match="there are steps 1 to 2"):
        step_table(steps, number)


def test_the_buttons_and_the_slider_redraw(steps, monkeypatch):
    drawn = []
    monkeypatch.setattr("helpers.plots.one_step", lambda step, most: drawn.append(step.step))
    back, slider, forth = iteration_explorer(steps).children[0].children
    forth.click()
    forth.click()
    assert slider.value == 2
    back.click()
    assert drawn == ["1 begin", "2 end", "1 begin"]


@pytest.mark.virtual_gpus(2)
def test_the_drawing_has_the_sizes_that_the_replicas_saw(monkeypatch):
    shown = []
    monkeypatch.setattr("helpers.plots.style.display", shown.append)
    gpus = [torch.device("vgpu", 0), torch.device("vgpu", 1)]
    show_parts(nn.Linear(32, 10).to(gpus[0]), torch.randn(13, 32), gpus)
    (picture,) = shown
    assert "7 × 32 on vgpu:0, 6 × 32 on vgpu:1" in picture.alt
    assert "330 weights" in picture.alt and "13 × 10 in all" in picture.alt
    # Where backward runs is the lesson's question, behind this drawing.
    assert "gradients" not in picture.alt
    show_parts(nn.Linear(32, 10).to(gpus[0]), torch.randn(13, 32), gpus, backward=True)
    assert "each GPU computes its own gradients" in shown[1].alt


def test_the_figure_of_the_steps_marks_the_peak(steps, monkeypatch):
    shown = []
    monkeypatch.setattr("helpers.plots.style.display", shown.append)
    plots.iteration(steps)
    # More than what is left after any step: the peak lies within the second.
    assert "at its peak 4 KiB" in shown[0].alt
