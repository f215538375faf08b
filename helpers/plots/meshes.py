"""Figures for meshes: groups of GPUs, shards of matrices, work in a ring, and load on experts."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from helpers.plots.style import COLORS, RANK_COLORS, figure, headline, show, title

Groups = Sequence[Sequence[int]]


_OTHERS = "#EEEEEE"
_REPLICATED = "#C8C8C8"


_MOST_LABELS = 32  # with more, drawing the cells' numbers would take most of the time


def mesh(groups: Mapping[str, Groups], gpus_per_host: int) -> None:
    """Draw each dimension's groups on a grid: a row per host, and a cell per GPU with its rank.

    ``groups`` has lists of ranks for each dimension. With up to eight groups, each has its own
    color; with more, only the first group, rank 0's, is colored. With more than 32 GPUs, only that
    group's cells are numbered.
    """
    hosts = 1 + max(max(group) for group in next(iter(groups.values()))) // gpus_per_host
    columns = min(len(groups), 4)
    fig, panels = figure(
        1, columns, width=0.5 + columns * max(1.8, 0.27 * gpus_per_host),
        height=1.2 + 0.27 * hosts, squeeze=False,
    )  # fmt: skip
    for axes, (name, dimension_groups) in zip(panels[0], groups.items(), strict=True):
        _draw_groups(axes, dimension_groups, gpus_per_host)
        axes.set(xlim=(-0.6, gpus_per_host - 0.4), ylim=(hosts - 0.4, -0.6), aspect="equal")
        axes.set_xticks([])
        axes.set_yticks(range(hosts), [f"host {host}" for host in range(hosts)], fontsize=8)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_title(
            f"{name}: {len(dimension_groups)} groups of {len(dimension_groups[0])}",
            loc="left",
            fontsize=10,
        )
        if axes is not panels[0, 0]:
            axes.set_yticklabels([])
    headline(fig, "In each panel, GPUs of one color communicate")
    summary = "; ".join(
        f"{name}, {len(dimension_groups)} groups of {len(dimension_groups[0])}, the first with ranks "
        f"{', '.join(map(str, dimension_groups[0]))}"
        for name, dimension_groups in groups.items()
    )
    show(fig, f"A grid of GPUs by host, once for each dimension of the mesh: {summary}.")


def _draw_groups(axes: Axes, groups: Groups, gpus_per_host: int) -> None:
    cells, colors = [], []
    several = len(groups) <= len(RANK_COLORS)
    with_all_ranks = len(groups) * len(groups[0]) <= _MOST_LABELS
    for number, group in enumerate(groups):
        color = RANK_COLORS[number] if several or number == 0 else _OTHERS
        for rank in group:
            host, place = divmod(rank, gpus_per_host)
            left, right, top, bottom = place - 0.45, place + 0.45, host - 0.45, host + 0.45
            cells.append([(left, top), (right, top), (right, bottom), (left, bottom)])
            colors.append(color)
            if with_all_ranks or number == 0:
                axes.text(
                    place, host, str(rank), ha="center", va="center", fontsize=7, in_layout=False
                )
    axes.add_collection(PolyCollection(cells, facecolor=colors, edgecolor="none"))


def ring_work(work: Mapping[str, Sequence[Sequence[float]]], unit: str) -> None:
    """Draw each rank's work in each step of a ring, a panel for each way to split a sequence.

    For each way, ``work`` has ``[rank][step]`` in ``unit``. Below each step is the maximum over the
    ranks, because all other ranks wait for the slowest one.
    """
    fig, panels = figure(1, len(work), width=1.2 + 3.2 * len(work), height=3.1, squeeze=False)
    most = max(max(row) for rows in work.values() for row in rows)
    for axes, (name, rows) in zip(panels[0], work.items(), strict=True):
        axes.imshow(rows, cmap="Blues", vmin=0, vmax=1.6 * most, aspect="auto")
        for rank, row in enumerate(rows):
            for step, amount in enumerate(row):
                axes.text(step, rank, f"{amount:.3g}", ha="center", va="center", in_layout=False)
        slowest = [max(column) for column in zip(*rows, strict=True)]
        axes.set_xticks(
            range(len(slowest)), [f"{s}\nmost: {m:.3g}" for s, m in enumerate(slowest)], fontsize=9
        )
        axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
        axes.set_xlabel("step of the ring")
        axes.grid(visible=False)
        axes.set_title(f"{name}: {sum(slowest):.3g} in total", loc="left", fontsize=10)
    headline(fig, "Each step takes as long as its slowest rank", f"{unit}, counted")
    summary = "; ".join(
        f"{name}: "
        + ", ".join(f"rank {rank} {[round(x, 3) for x in row]}" for rank, row in enumerate(rows))
        for name, rows in work.items()
    )
    show(fig, f"Tables of {unit} by rank and step of the ring. {summary}.")


def expert_load(tokens: Sequence[int], experts_per_rank: int) -> None:
    """Plot the rows sent to each expert, colored by the expert's rank."""
    fig, axes = figure(width=7.0, height=2.9)
    ranks = len(tokens) // experts_per_rank
    colors = [RANK_COLORS[number // experts_per_rank] for number in range(len(tokens))]
    axes.bar(range(len(tokens)), tokens, color=colors)
    mean = sum(tokens) / len(tokens)
    axes.axhline(mean, color=COLORS["black"], lw=1, ls="--")
    axes.text(len(tokens) - 0.4, mean, f"mean {mean:.0f}", va="bottom", ha="left", fontsize=9)
    axes.set_xlim(-0.6, len(tokens) + 0.6)
    axes.set_xticks(range(len(tokens)), [str(number) for number in range(len(tokens))])
    axes.set(xlabel="expert", ylabel="rows")
    for rank in range(ranks):
        middle = (rank + 0.5) * experts_per_rank - 0.5
        held = sum(tokens[rank * experts_per_rank : (rank + 1) * experts_per_rank])
        axes.text(middle, max(tokens) * 1.06, f"rank {rank}: {held}", ha="center", fontsize=9)
    axes.set_ylim(0, max(tokens) * 1.18)
    title(axes, "The busiest rank sets the pace", f"counted on {ranks} real ranks")
    summary = ", ".join(f"expert {number} {count}" for number, count in enumerate(tokens))
    show(fig, f"Bar chart of rows per expert: {summary}; the mean is {mean:.0f}.")


WHOLE, ROWS, COLUMNS, PARTIAL = "whole", "rows", "columns", "partial"


_SAID = {
    WHOLE: "all of it",
    ROWS: "its rows",
    COLUMNS: "its columns",
    PARTIAL: "a partial sum",
}


class Held(NamedTuple):
    """A matrix in a figure: the text before it, its name, its shape, and which part each GPU holds.

    part: "whole" (each GPU holds all of it), "rows" or "columns" (each holds its own), or "partial"
    (each holds a matrix of the full size, and the sum over the GPUs is the matrix).
    """

    before: str
    name: str
    rows: int
    columns: int
    part: str


def held(
    tensors: Sequence[tuple[str, str, int, int, str]],
    gpus: int,
    message: str,
    new_rows: Collection[str] = (),
) -> None:
    """Draw matrices, a row per GPU: the full matrix is outlined, and the GPU's own part is colored.

    A matrix that is the same on each GPU is gray. ``new_rows`` names the matrices whose
    last row was just added; that row is drawn darker. For ``tensors``, see ``Held``.
    """
    drawn = [Held(*tensor) for tensor in tensors]
    scale = 1.4 / max(max(tensor.rows, tensor.columns) for tensor in drawn)
    height = scale * max(tensor.rows for tensor in drawn)
    places, width = [], 0.9
    for tensor in drawn:
        width += 0.12 * len(tensor.before) + 0.25
        places.append(width)
        width += max(scale * tensor.columns, 0.11 * len(tensor.name)) + 0.25
    fig, axes = figure(
        width=min(9.0, max(5.0, 0.9 * width)), height=0.9 + gpus * (height + 0.35) * 0.8
    )
    for gpu in range(gpus):
        middle = gpu * (height + 0.35)
        axes.text(0.0, middle, f"GPU {gpu}", va="center")
        for left, tensor in zip(places, drawn, strict=True):
            axes.text(left - 0.12, middle, tensor.before, ha="right", va="center")
            _matrix(axes, left, middle, scale, tensor, gpu, gpus, tensor.name in new_rows)
    for left, tensor in zip(places, drawn, strict=True):
        center = left + scale * tensor.columns / 2
        axes.text(center, -height / 2 - 0.22, tensor.name, ha="center", fontsize=9)
    axes.set(xlim=(-0.05, width), ylim=(gpus * (height + 0.35) - height / 2, -height / 2 - 0.45))
    axes.set_aspect("equal", anchor="W")
    axes.axis("off")
    said = {WHOLE: "gray: the same on each GPU", PARTIAL: "hatched: part of a sum"}
    parts = [tensor.part for tensor in drawn]
    keys = ["colored: the GPU's own part", *(said[part] for part in said if part in parts)]
    keys += ["dark: the new row"] if new_rows else []
    title(axes, message, "; ".join(keys))
    summary = ", ".join(
        f"{tensor.name} ({tensor.rows} by {tensor.columns}) {_SAID[tensor.part]}"
        for tensor in drawn
    )
    added = f" The last row of {' and '.join(new_rows)} is new." if new_rows else ""
    show(
        fig,
        f"A row for each of {gpus} GPUs. {message}. Each GPU holds, from left to right: {summary}."
        f"{added}",
    )


def _matrix(
    axes: Axes,
    left: float,
    middle: float,
    scale: float,
    tensor: Held,
    gpu: int,
    gpus: int,
    new_row: bool,
) -> None:
    width, height = scale * tensor.columns, scale * tensor.rows
    top = middle - height / 2
    axes.add_patch(Rectangle((left, top), width, height, fill=False, ec="#BBBBBB", ls=":"))
    x, y, w, h = left, top, width, height
    if tensor.part == ROWS:
        y, h = top + gpu * height / gpus, height / gpus
    elif tensor.part == COLUMNS:
        x, w = left + gpu * width / gpus, width / gpus
    hatch = "////" if tensor.part == PARTIAL else None
    color = _REPLICATED if tensor.part == WHOLE else RANK_COLORS[gpu]
    axes.add_patch(Rectangle((x, y), w, h, fc=color, ec="#444444", lw=0.8, hatch=hatch, alpha=0.9))
    if new_row:  # of all rows, which only "whole", "columns" and "partial" have
        axes.add_patch(Rectangle((x, y + h - scale), w, scale, fc="#333333", ec="#444444", lw=0.8))
