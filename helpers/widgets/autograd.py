"""Explorer for the graph of a small expression, before and after a cut in the middle."""

from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import torch
from IPython.display import display

from helpers import plots
from helpers.autograd_graph import Graph, graph_of, shared_part
from helpers.widgets.live import live
from vgpu.tables import Table

EXPRESSIONS = (
    ("x * w", "(tanh(h) * v + x).sum()"),
    ("x + w", "(h * v).sum()"),
    ("exp(x * w)", "(h * h + v).sum()"),
    ("tanh(x)", "(h * w).sum() + (h * v).sum()"),
)
CUTS = ("detach()", ".data", "no_grad()")

_NAMES = {name: getattr(torch, name) for name in ("exp", "tanh", "sigmoid", "relu")}


@dataclass(frozen=True)
class Comparison:
    """One expression computed twice: as written, and with the graph cut at ``h``.

    ``kept_nodes`` and ``kept_edges`` are indices into ``graph``, the graph as written. A gradient
    is None if the backward pass didn't reach the tensor.
    """

    cut: str
    graph: Graph
    kept_nodes: set[int]
    kept_edges: set[int]
    values: tuple[float, float]
    gradients: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]

    def table(self) -> Table:
        rows = [(f"d y / d {name}", *map(_spoken, pair)) for name, pair in self.gradients.items()]
        values = [f"{value:.4f}" for value in self.values]
        return Table(("", "as written", f"after {self.cut}"), [("y", *values), *rows])


def compare(inner: str, outer: str, cut: str) -> Comparison:
    """Compute ``h = inner`` and ``y = outer`` as written and with ``h`` cut, and run backward.

    The expressions may use the vectors x, w and v (three elements each, all requiring gradients)
    and the functions exp, tanh, sigmoid and relu; ``outer`` may also use h. ``cut`` is one of CUTS.
    Raises ValueError for any other cut, or if y isn't a scalar that depends on x, w or v.
    """
    if cut not in CUTS:
        raise ValueError(f"cut is {cut!r}; it must be one of {', '.join(CUTS)}")
    whole, h, whole_leaves = _evaluate(inner, outer, None)
    short, _, short_leaves = _evaluate(inner, outer, cut)
    graph = graph_of(whole, {**whole_leaves, "h": h})
    kept_nodes, kept_edges = shared_part(whole, short)
    for result in (whole, short):
        if result.requires_grad:
            result.backward()
    return Comparison(
        cut,
        graph,
        kept_nodes,
        kept_edges,
        (whole.item(), short.item()),
        {name: (whole_leaves[name].grad, short_leaves[name].grad) for name in whole_leaves},
    )


def explore(inner: str, outer: str, cut: str) -> None:
    """Show ``compare`` as a figure and a table."""
    comparison = compare(inner, outer, cut)
    kept = comparison.kept_nodes, comparison.kept_edges
    plots.graph_before_and_after(comparison.graph, *kept, cut)
    display(comparison.table())


def graph_explorer() -> widgets.VBox:
    """Return two dropdowns, and below them what ``explore`` shows for the selected options."""
    options = [(f"h = {inner};  y = {outer}", (inner, outer)) for inner, outer in EXPRESSIONS]
    wide: Any = {"width": "30em"}
    controls = {
        "expression": widgets.Dropdown(options=options, description="compute", layout=wide),
        "cut": widgets.Dropdown(options=CUTS, description="cut h with"),
    }
    drawn = live(lambda expression, cut: explore(expression[0], expression[1], cut), controls)
    return widgets.VBox([*controls.values(), drawn])


def _evaluate(
    inner: str, outer: str, cut: str | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return y, h, and the leaves by name; the graph is cut at ``h`` unless ``cut`` is None."""
    numbers = {"x": (0.5, 1.0, 1.5), "w": (1.0, -1.0, 0.5), "v": (2.0, 1.0, -1.0)}
    leaves = {name: torch.tensor(data, requires_grad=True) for name, data in numbers.items()}
    with torch.set_grad_enabled(cut != "no_grad()"):
        h = eval(inner, dict(_NAMES), leaves)
    if cut == "detach()":
        h = h.detach()
    elif cut == ".data":
        h = h.data
    y = eval(outer, dict(_NAMES), {**leaves, "h": h})
    if y.dim() or not (y.requires_grad or cut):
        raise ValueError(f"y = {outer} must be a scalar that depends on x, w or v; add .sum()")
    return y, h, leaves


def _spoken(gradient: torch.Tensor | None) -> str:
    if gradient is None:
        return "None: backward doesn't reach it"
    return "[" + ", ".join(f"{number:.3f}" for number in gradient.tolist()) + "]"
