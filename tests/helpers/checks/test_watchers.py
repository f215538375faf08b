"""A layer that records how many of its forward passes' graphs are still held."""

import torch

from helpers.checks.watchers import WatchedLinear


def held_by(backward):
    """Return what a layer records in three forward passes, each followed by ``backward(loss)``."""
    layer = WatchedLinear(3, 1)
    kept = [backward(layer(torch.ones(count, 3)).sum()) for count in (4, 5, 6)]
    assert layer.samples == [4, 5, 6]
    assert len(kept) == 3
    return layer.graphs_held


def test_kept_losses_hold_every_graph():
    assert held_by(lambda loss: loss) == [0, 1, 2]
    assert held_by(lambda loss: loss.backward(retain_graph=True) or loss) == [0, 1, 2]


def test_a_kept_loss_holds_nothing_after_backward():
    assert held_by(lambda loss: loss.backward() or loss) == [0, 0, 0]


def test_a_graph_without_references_is_not_held():
    assert held_by(lambda loss: loss.detach()) == [0, 0, 0]
