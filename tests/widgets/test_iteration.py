"""The explorer of lesson 05: back and forth through the recorded steps."""

import pytest
import torch

from helpers.memory import Snapshot
from helpers.widgets.iteration import iteration_explorer, step_table

A, B = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def steps():
    return [
        Snapshot("1 begin", {A: {"inputs": 2048, "outputs": 0}, B: {"inputs": 0, "outputs": 0}}),
        Snapshot("2 end", {A: {"inputs": 0, "outputs": 1024}, B: {"inputs": 0, "outputs": 512}}),
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
