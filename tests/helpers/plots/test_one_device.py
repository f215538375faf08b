"""Figures of the first lessons, read through their alternative texts and what is drawn."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from helpers import plots
from helpers.plots import style

matplotlib.use("Agg")


@pytest.fixture
def shown(monkeypatch):
    """Alternative texts of the figures, and the texts drawn in them."""
    figures = []

    def read(picture):
        drawn = [t.get_text() for axes in plt.gcf().axes for t in axes.texts]
        figures.append((picture.alt, drawn))

    monkeypatch.setattr(style, "display", read)
    return figures


@pytest.mark.virtual_gpus(2)
def test_memories_hold_each_tensor_once(shown):
    gpus = [torch.device("vgpu:0"), torch.device("vgpu:1")]
    x = torch.zeros(3)
    y = x.to(gpus[1])
    plots.memories({"x": x, "y": y, "z": y}, gpus, copies=[("x", "y")])
    ((alt, drawn),) = shown
    assert "x in main memory; y and z in the memory of GPU 1; an arrow from x to y" in alt
    assert drawn.count("x  (3,)") == 1 and "y, z  (3,)" in drawn and ".to" in drawn
    with pytest.raises(ValueError, match="not in list"):
        plots.memories({"x": y}, gpus[:1])
    assert not plt.get_fignums(), "a figure that cannot be drawn is not left open"


def test_relabelled_cards_are_joined_to_their_ordinals(shown):
    plots.relabelled({"1,3": [1, 3], "": []}, cards=4)
    ((alt, drawn),) = shown
    assert '"1,3": cuda:0 is card 1, cuda:1 is card 3; "": none.' in alt
    assert drawn.count("cuda:\n1") == 1 and "no GPU is seen" in drawn


def test_a_network_is_drawn_as_it_runs(shown):
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU())
    plots.network(model, torch.rand(2, 2, 3))
    ((alt, drawn),) = shown
    assert "input 2×3, Flatten 6, Linear 4, ReLU 4" in alt
    assert drawn[:3] == ["2 × 3", "6", "4"]
    assert not model[1]._forward_hooks
