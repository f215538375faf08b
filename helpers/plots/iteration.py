"""One training step: each GPU's bytes after every part of it, by cause."""

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from helpers.plots.style import COLOURS, figure, headline, show
from vgpu.profiling.memory import OTHER, Snapshot
from vgpu.units import format_bytes

_MIB = 2**20
_OF_CAUSE = {
    "parameters": COLOURS["blue"],
    "inputs": COLOURS["black"],
    "replicas": COLOURS["sky"],
    "outputs": COLOURS["orange"],
    "gradients": COLOURS["vermilion"],
    "optimizer state": COLOURS["purple"],
    OTHER: COLOURS["grey"],
}


# Columns of the drawing of one call, and the part that leads from each to the next.
_COLUMNS = ("batch", "scatter", "replicate", "parallel_apply", "gather", "backward, reduce")


def four_parts(
    chunks: Sequence[torch.Tensor],
    weights: Sequence[int],
    outputs: Sequence[torch.Tensor],
    output: torch.Tensor,
    *,
    backward: bool = False,
) -> None:
    """One call of DataParallel as boxes with sizes: a row a GPU, time to the right.

    chunks and outputs: one tensor a GPU, in their order; weights: how many numbers each replica
    has; output: what was gathered on the first GPU. backward: draw its gradients, too.
    """
    gpus = [chunk.device for chunk in chunks]
    columns = _COLUMNS if backward else _COLUMNS[:-1]
    made, axes = figure(width=1.5 * len(columns), height=1.1 + 0.85 * len(gpus))
    _box(axes, 0, 0, f"batch\n{len(output)} × {chunks[0].shape[1]}", "grey")
    for row, (gpu, chunk, out) in enumerate(zip(gpus, chunks, outputs, strict=True)):
        axes.text(-0.55, row, str(gpu), ha="right", va="center", fontweight="bold")
        _box(axes, 1, row, f"chunk\n{_by(chunk)}", "grey")
        what = "your model" if row == 0 else "a copy"
        _box(axes, 2, row, f"{what}\n{weights[row]:,} weights", "blue" if row == 0 else "sky")
        _box(axes, 3, row, f"output\n{_by(out)}", "orange")
        _arrow(axes, (0, 0), (1, row))
        _arrow(axes, (1, row), (2, row))
        _arrow(axes, (2, row), (3, row))
        _arrow(axes, (3, row), (4, 0))
        if row > 0:
            _arrow(axes, (2, row - 1), (2, row), down=True)
    _box(axes, 4, 0, f"output\n{_by(output)}", "orange")
    if backward:
        _draw_gradients(axes, weights)
    axes.set(xlim=(-1.2, len(columns) - 0.5), ylim=(len(gpus) - 0.55, -0.85))
    for column, name in enumerate(columns):
        axes.text(column, -0.65, name, ha="center", va="center", color="#444444", fontsize=9)
    axes.axis("off")
    back = ": and back again" if backward else ""
    headline(made, f"Cut, copied, computed, joined{back}", "sizes of a real call")
    cut = ", ".join(f"{_by(chunk)} on {gpu}" for chunk, gpu in zip(chunks, gpus, strict=True))
    show(
        made,
        f"Boxes and arrows, a row for each GPU. The batch on {gpus[0]} is scattered: {cut}. The "
        f"model's {weights[0]:,} weights are copied from {gpus[0]} to the others. Each replica's "
        f"output goes back to {gpus[0]}, {_by(output)} in all."
        + (
            f" In backward each GPU computes its own gradients, and they are added up on {gpus[0]}."
            if backward
            else ""
        ),
    )


def _draw_gradients(axes: Axes, weights: Sequence[int]) -> None:
    for row, count in enumerate(weights):
        _box(axes, 5, row, f"gradients\n{count:,}", "vermilion")
        _arrow(axes, (4, 0), (5, row))
        if row > 0:
            _arrow(axes, (5, row), (5, row - 1), down=True)
            axes.text(5.06, row - 0.5, "+", fontsize=13, va="center")


def _by(tensor: torch.Tensor) -> str:
    return " × ".join(map(str, tensor.shape))


def _box(axes: Axes, column: int, row: int, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (column - 0.34, row - 0.24),
            0.68,
            0.48,
            boxstyle="round,pad=0.03",
            facecolor=COLOURS[colour],
            alpha=0.35,
            edgecolor=COLOURS[colour],
        )
    )
    axes.text(column, row, text, ha="center", va="center", fontsize=8)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, down: bool = False
) -> None:
    """From one box's edge to another's: right to left edges, or along a column."""
    if down:
        step = 0.3 if end[1] > start[1] else -0.3
        ends = (start[0], start[1] + step), (end[0], end[1] - step)
    else:
        ends = (start[0] + 0.38, start[1]), (end[0] - 0.38, end[1])
    axes.annotate(
        "", xy=ends[1], xytext=ends[0], arrowprops={"arrowstyle": "->", "color": "#555555"}
    )


def iteration(steps: Sequence[Snapshot]) -> None:
    """A panel for each GPU: one stacked bar after each step, MiB by cause; a mark at each peak."""
    gpus = list(steps[-1].by_cause)
    made, panels = figure(len(gpus), 1, width=8, height=2.2 * len(gpus), sharex=True, sharey=True)
    for gpu, axes in zip(gpus, panels, strict=True):
        bottom = [0.0] * len(steps)
        for cause in steps[-1].by_cause[gpu]:
            sizes = [step.by_cause[gpu].get(cause, 0) / _MIB for step in steps]
            axes.bar(range(len(steps)), sizes, 0.7, bottom, color=_OF_CAUSE[cause], label=cause)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        peaks = [step.peak_bytes[gpu] / _MIB for step in steps]
        places = range(len(steps))
        axes.hlines(peaks, [x - 0.42 for x in places], [x + 0.42 for x in places], color="black")
        highest = max(places, key=lambda place: peaks[place])
        axes.annotate(
            f"peak {peaks[highest]:.1f}",
            (highest, peaks[highest]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
        axes.set_ylabel(f"{gpu}\nMiB")
        axes.grid(axis="x", visible=False)
    top = max(step.peak_bytes[gpu] for step in steps for gpu in gpus) / _MIB
    panels[0].set_ylim(0, 1.25 * top)
    panels[-1].set_xticks(range(len(steps)), [_two_lines(step.step) for step in steps], fontsize=8)
    panels[0].legend(loc="upper left", ncols=2, fontsize=8)
    headline(made, "GPU 0 carries what the others do not", "counted; a line marks the peak")
    told = "; ".join(
        f"{gpu} holds "
        + ", ".join(f"{format_bytes(step.total_bytes(gpu))} after {step.step}" for step in steps)
        + f", at its peak {format_bytes(max(step.peak_bytes[gpu] for step in steps))}"
        for gpu in gpus
    )
    show(
        made,
        f"Stacked bars of bytes by cause, a panel for each GPU and a bar for each step: {told}.",
    )


def one_step(step: Snapshot, most_bytes: int) -> None:
    """One moment: a bar for each GPU, MiB by cause; ``most_bytes`` fixes the axis."""
    made, axes = figure(width=7.5, height=0.8 + 0.55 * len(step.by_cause))
    gpus = list(step.by_cause)[::-1]
    left = [0.0] * len(gpus)
    # Every cause, present or not: the legend stays as it is from step to step.
    for cause in _OF_CAUSE:
        sizes = [step.by_cause[gpu].get(cause, 0) / _MIB for gpu in gpus]
        axes.barh(range(len(gpus)), sizes, 0.6, left, color=_OF_CAUSE[cause], label=cause)
        left = [low + size for low, size in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(gpus)), [str(gpu) for gpu in gpus])
    axes.set_xlim(0, most_bytes / _MIB * 1.02)
    axes.set_xlabel("MiB, counted")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    headline(made, f"After step {step.step}", "bytes by cause")
    told = "; ".join(
        f"{gpu} "
        + (
            ", ".join(f"{name} {format_bytes(size)}" for name, size in causes.items() if size)
            or "0"
        )
        for gpu, causes in step.by_cause.items()
    )
    show(made, f"A bar of bytes by cause for each GPU, after step {step.step}: {told}.")


def peaks_before_and_after(
    gpus: Sequence[torch.device], outside: Sequence[int], inside: Sequence[int]
) -> None:
    """Peak bytes of each GPU with the loss outside the model, and inside its forward."""
    made, axes = figure(width=7, height=3)
    for index, gpu in enumerate(gpus):
        colour = COLOURS["vermilion"] if index == 0 else COLOURS["blue"]
        places = [index * 0.4, index * 0.4 + len(gpus) * 0.4 + 0.4]
        sizes = [outside[index] / _MIB, inside[index] / _MIB]
        bars: Any = axes.bar(places, sizes, 0.36, color=colour, label=str(gpu))
        axes.bar_label(bars, fmt="%.1f", padding=2)
    middle = (len(gpus) - 1) * 0.2
    axes.set_xticks(
        [middle, middle + len(gpus) * 0.4 + 0.4],
        ["outputs gathered, loss outside", "loss in forward"],
    )
    axes.set_ylabel("peak of one step, MiB")
    axes.set_ylim(0, max(outside) / _MIB * 1.15)
    axes.grid(axis="x", visible=False)
    axes.legend()
    headline(made, "Returning the loss from forward evens the memory out", "counted")
    each = "; ".join(
        f"{gpu} {format_bytes(before)} with the loss outside, {format_bytes(after)} in forward"
        for gpu, before, after in zip(gpus, outside, inside, strict=True)
    )
    show(made, f"Bars of one step's peak bytes by GPU: {each}.")


def _two_lines(step: str) -> str:
    number, _, words = step.partition(" ")
    first, _, rest = words.partition(" ")
    return f"{number} {first}\n{rest}"
