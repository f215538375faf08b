"""Lesson 02's explorer: what it computes, and how it responds to its controls."""

import matplotlib.pyplot as plt
import pytest
import torch

from helpers.widgets import autograd
from helpers.widgets.autograd import CUTS, EXPRESSIONS, compare

INNER, OUTER = EXPRESSIONS[0]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("inner", "outer"), EXPRESSIONS)
def test_a_cut_changes_the_graph_but_not_the_value(inner, outer, cut):
    found = compare(inner, outer, cut)
    assert found.values[0] == pytest.approx(found.values[1])
    assert 0 < len(found.kept_nodes) < len(found.graph.nodes)
    assert len(found.kept_edges) < len(found.graph.edges)


def test_the_gradients_match_the_expression():
    found = compare(INNER, OUTER, "detach()")
    x, w, v = torch.tensor([[0.5, 1, 1.5], [1, -1, 0.5], [2, 1, -1]])
    slope = 1 - torch.tanh(x * w) ** 2
    torch.testing.assert_close(found.gradients["x"][0], slope * w * v + 1)
    torch.testing.assert_close(found.gradients["w"][0], slope * x * v)
    torch.testing.assert_close(found.gradients["x"][1], torch.ones(3))
    assert found.gradients["w"][1] is None
    assert "None" in str(found.table())


def test_a_cut_can_remove_the_entire_graph():
    found = compare("x * w", "h.sum()", ".data")
    assert found.kept_nodes == set() and found.kept_edges == set()
    assert all(after is None for _, after in found.gradients.values())


def test_compare_explains_a_mistake_in_an_expression():
    with pytest.raises(ValueError, match=r"cut is 'clone'.*detach"):
        compare(INNER, OUTER, "clone")
    with pytest.raises(ValueError, match=r"a scalar.*add \.sum"):
        compare("x * w", "h * v", "detach()")
    with pytest.raises(ValueError, match="depends on x, w or v"):
        compare("x.detach()", "h.sum()", ".data")


def test_the_explorer_redraws_when_a_control_changes(monkeypatch):
    drawn = []
    monkeypatch.setattr(autograd, "explore", lambda *chosen: drawn.append(chosen))
    expression, cut, _ = autograd.graph_explorer().children
    cut.value = ".data"
    expression.value = EXPRESSIONS[2]
    assert drawn == [
        (*EXPRESSIONS[0], "detach()"),
        (*EXPRESSIONS[0], ".data"),
        (*EXPRESSIONS[2], ".data"),
    ]


def test_every_expression_is_drawn_and_its_figure_closed(monkeypatch):
    texts = []

    def read(_):
        texts.append([t.get_text() for t in plt.gca().texts])

    monkeypatch.setattr("helpers.plots.style.display", read)
    for inner, outer in EXPRESSIONS:
        autograd.explore(inner, outer, "no_grad()")
    autograd.explore("x * w", "h.sum()", "no_grad()")
    assert all("after no_grad()" in text and "x.grad" in text for text in texts)
    assert len(texts) == len(EXPRESSIONS) + 1 and not plt.get_fignums()
