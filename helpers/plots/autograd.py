"""Figures for autograd: right and wrong gradients, memory kept by summed losses, a cut graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes

from helpers.autograd_graph import Graph
from helpers.plots.style import COLORS, arrow, figure, headline, show, title

_STEP = 1.5  # distance between neighboring nodes in a row; rows are 1 apart


def gradients(
    x: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor, slope: torch.Tensor
) -> None:
    """Plot two gradients of a function at ``x`` (N,), and its slope by finite differences."""
    fig, axes = figure(width=7.5, height=3.4)
    axes.plot(x, right, color=COLORS["blue"], label="written out of place")
    axes.plot(x, wrong, color=COLORS["vermilion"], linestyle="--", label="edited through .data")
    dots = slice(2, None, max(len(x) // 24, 1))
    if len(flat := x[slope.abs() < 1e-6]):
        axes.text(flat.max(), 0.04, "flat: the derivative is 0", ha="right", fontsize=9)
    axes.plot(x[dots], slope[dots], "o", color=COLORS["black"], ms=4, label="finite differences")
    axes.set(xlabel="x", ylabel="gradient dy/dx")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    title(
        axes,
        "Only one gradient matches the finite differences",
        "computed by autograd; dots: finite differences",
    )
    apart = (wrong - slope).abs()
    show(
        fig,
        f"Line chart of the gradient for x from {x.min():g} to {x.max():g}. The out-of-place "
        "version's gradient goes through the finite differences. With the edit through .data, it's "
        f"off by up to {apart.max():.2f}, at {(apart > 0.01).float().mean():.0%} of the points.",
    )


def kept_per_step(runs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Plot the bytes and graph nodes alive after each step, a line for each way to sum losses.

    ``runs`` maps a name to one ``(bytes, nodes)`` pair per step.
    """
    fig, panels = figure(1, 2, width=8.5, height=2.9, sharex=True)
    looks: Any = zip(("orange", "blue", "black"), (6, 2.5, 1.5), ("-", "--", ":"), strict=True)
    for (name, pairs), (color, width, line) in zip(runs.items(), looks, strict=False):
        steps = range(1, len(pairs) + 1)
        style = {"color": COLORS[color], "linewidth": width, "linestyle": line, "label": name}
        panels[0].plot(steps, [size / 2**10 for size, _ in pairs], **style)
        panels[1].plot(steps, [nodes for _, nodes in pairs], **style)
    for axes, heading in zip(
        panels, ("saved tensors alive, KiB", "graph nodes kept by the sum"), strict=True
    ):
        axes.set(xlabel="step", ylabel=heading, ylim=(0, None))
    panels[0].legend(loc="upper left", fontsize=9)
    headline(fig, "A sum of loss tensors grows with every step", "counted")
    ends = (
        f"{name}: {pairs[-1][0] / 2**10:.0f} KiB and {pairs[-1][1]} nodes"
        for name, pairs in runs.items()
    )
    show(
        fig,
        "Two line charts over the steps, a line per loop: KiB of saved tensors alive, and graph nodes "
        f"kept by the sum. After the last step, {'; '.join(ends)}.",
    )


def graph_before_and_after(
    graph: Graph, kept_nodes: set[int], kept_edges: set[int], after: str
) -> None:
    """Draw a graph twice: complete, and with everything that a cut removed as pale dashed lines.

    The cut was made at a named intermediate result, such as "h = Mul", which is highlighted.
    """
    everything = set(range(len(graph.nodes))), set(range(len(graph.edges)))
    places = _places(graph)
    width = max(x for x, _ in places) - min(x for x, _ in places) + 2.4
    height = 1 - min(y for _, y in places)
    fig, axes = figure(width=8.5, height=0.5 + 0.62 * height)
    # One Axes without ticks, placed by hand, takes a third of the time of two with automatic
    # layout, and the explorer redraws this on every change.
    fig.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1 - 0.3 / (0.5 + 0.62 * height)))
    axes.set(xticks=[], yticks=[], xlim=(0, 2 * width), ylim=(0.2 - height, 0.9))
    axes.set_axis_off()
    for column, (heading, kept) in enumerate(
        (("as written", everything), (f"after {after}", (kept_nodes, kept_edges)))
    ):
        middle = (column + 0.5) * width - sum((min(places)[0], max(places)[0])) / 2
        axes.text((column + 0.5) * width, 0.6, heading, ha="center", fontsize=11)
        _draw(axes, graph, [(x + middle, y) for x, y in places], *kept)
    headline(fig, "Arrows show the direction of backward()", "read from grad_fn")
    lost = [node.label for index, node in enumerate(graph.nodes) if index not in kept_nodes]
    show(
        fig,
        f"An autograd graph twice: as written, with {len(graph.nodes)} nodes and "
        f"{len(graph.edges)} arrows, and after {after}, with {len(kept_nodes)} and "
        f"{len(kept_edges)}. {'Cut off: ' + ', '.join(lost) if lost else 'No node is cut off'}.",
    )


def _draw(
    axes: Axes,
    graph: Graph,
    places: Sequence[tuple[float, float]],
    nodes: set[int],
    edges: set[int],
) -> None:
    for index, node in enumerate(graph.nodes):
        kept = index in nodes
        color = COLORS["green" if node.is_leaf else "blue"] if kept else COLORS["gray"]
        axes.text(
            *places[index],
            f"{node.label}.grad" if node.is_leaf else node.label,
            ha="center",
            va="center",
            fontsize=9,
            color="#FFFFFF" if kept else "#777777",
            bbox={
                "boxstyle": "round,pad=0.35",
                "facecolor": color if kept else "#FFFFFF",
                "edgecolor": color,
                "linestyle": "-" if kept else "--",
            },
            zorder=3,
        )
        if " = " in node.label and not kept:
            x, y = places[index]
            mark: Any = {"fontsize": 9, "fontweight": "bold", "color": COLORS["vermilion"]}
            axes.text(x + 0.75, y, "✕ cut here", va="center", zorder=4, **mark)
    for number, edge in enumerate(graph.edges):
        kept = number in edges
        bend = _bend(edge in graph.edges[:number], places[edge[0]], places[edge[1]])
        arrow(
            axes,
            places[edge[0]],
            places[edge[1]],
            "#444444" if kept else "#CCCCCC",
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=12,
            shrinkB=12,
            linestyle="-" if kept else "--",
        )


def _places(graph: Graph) -> list[tuple[float, float]]:
    """Each node's position: deeper nodes lower, operations in the middle, leaves next to them."""
    places: dict[int, tuple[float, float]] = {}
    for depth in range(max(node.depth for node in graph.nodes) + 1):
        level = [index for index, node in enumerate(graph.nodes) if node.depth == depth]
        middle = [index for index in level if not graph.nodes[index].is_leaf] or level
        leaning = {
            index: sum(places[later][0] for later, earlier in graph.edges if earlier == index)
            for index in level
            if index not in middle
        }
        left = [index for index in leaning if leaning[index] < 0]
        right = [index for index in leaning if leaning[index] >= 0]
        start = -_STEP * (len(left) + (len(middle) - 1) / 2)
        for column, index in enumerate([*left, *middle, *right]):
            places[index] = (start + _STEP * column, -float(depth))
    return [places[index] for index in range(len(graph.nodes))]


def _bend(is_double: bool, start: tuple[float, float], end: tuple[float, float]) -> float:
    """How far an arrow bends: around nodes between its ends, and away from a duplicate arrow."""
    if start[1] - end[1] > 1:
        return 0.22 if end[0] < start[0] else -0.22
    return 0.5 if is_double else 0.0
