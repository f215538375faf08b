"""Figures of lesson 12, by what stands on them."""

import matplotlib.pyplot as plt

from helpers.plots import sharding


def test_who_holds_has_a_row_for_each_cause_that_sharding_cuts(monkeypatch):
    figures = []
    monkeypatch.setattr(sharding, "show", lambda made, alt: figures.append((made, alt)))
    sharding.who_holds({"nothing cut": [], "ZeRO-1": ["optimizer state"]}, gpus=2)
    [(made, alt)] = figures
    rows = [label.get_text() for label in made.axes[0].get_yticklabels()]
    plt.close(made)
    assert rows == ["parameters", "gradients", "optimizer state"]
    assert "ZeRO-1: cut are optimizer state" in alt
