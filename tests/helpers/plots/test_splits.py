"""Figures of split tensors."""

import matplotlib.pyplot as plt
import pytest

from helpers.plots.parallel import splits
from vgpu import Timeline


@pytest.fixture
def alt(monkeypatch):
    said = []

    def show(figure, alt):
        said.append(alt)
        plt.close(figure)

    monkeypatch.setattr(splits, "show", show)
    return said


def test_each_matrix_is_said_with_what_a_gpu_has_of_it(alt):
    splits.held([("", "x", 6, 8, "whole"), ("=", "y", 6, 4, "partial")], 2, "By rows")
    assert "x (6 by 8) all of it, y (6 by 4) a sum's part" in alt[0]


def test_a_part_that_no_gpu_can_have_is_refused(alt):
    with pytest.raises(ValueError, match="x is held 'half'; parts are whole, rows, columns"):
        splits.held([("", "x", 6, 8, "half")], 2, "By half")
    assert alt == []


def test_times_and_gains_are_said_in_numbers(alt):
    made = Timeline("H100", [])
    made.makespan_s = 0.002
    splits.split_times({"1 GPU": made}, "A layer")
    splits.gained({1024: {1: 2e-3, 8: 1e-3}, 2048: {1: 4e-3, 8: 1e-3}}, "It gains", "virtual time")
    assert "1 GPU: 2.00 ms, 0% of it in collectives" in alt[0]
    assert "8 GPUs: 2.00 at width 1024, 4.00 at width 2048" in alt[1]
