"""Sharding: who holds which part, bytes of a GPU by cause, bytes over a step, and a loss that falls."""

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.patches import Rectangle

from helpers.plots.style import COLOURS, figure, show, title

_OF_CAUSE = {
    "parameters": COLOURS["blue"],
    "gradients": COLOURS["vermilion"],
    "optimizer state": COLOURS["purple"],
    "gathered": COLOURS["sky"],
    "gathered parameters": COLOURS["sky"],
    "activations": COLOURS["orange"],
    "temporary": COLOURS["grey"],
    "gradients, gathered parameters, activations": COLOURS["sky"],
}
_UNITS = {"GB": 1e9, "GiB": 2**30}
_GIB = 2**30


def held_by_cause(
    held: Mapping[str, Mapping[str, float]],
    capacity_bytes: float | None = None,
    message: str = "What each GPU holds",
    how: str = "bytes counted, shapes only",
    unit: str = "GB",
) -> None:
    """A bar for each way: the bytes of one GPU by cause, in GB or GiB; dashed, what a GPU has."""
    made, axes = figure(width=8, height=1.1 + 0.45 * len(held))
    names = list(held)[::-1]
    left = [0.0] * len(names)
    for cause, colour in _OF_CAUSE.items():
        sizes = [held[name].get(cause, 0) / _UNITS[unit] for name in names]
        if any(sizes):
            axes.barh(range(len(names)), sizes, 0.6, left, color=colour, label=cause)
        left = [low + size for low, size in zip(left, sizes, strict=True)]
    widest = max(left)
    room = ""
    if capacity_bytes is not None:
        capacity = capacity_bytes / _UNITS[unit]
        axes.axvline(capacity, color="black", linestyle="--", linewidth=1)
        widest = max(widest, capacity)
        room = f" A GPU has {capacity:.0f} {unit}."
    for place, total in enumerate(left):
        axes.annotate(
            f"{total:.1f} {unit}",
            (total, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            # The dashed line may run behind it.
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0},
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, widest * 1.3)
    axes.set_xlabel(f"{unit} on each GPU")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    title(axes, message, how)
    told = "; ".join(f"{name} {total:.1f} {unit}" for name, total in zip(names, left, strict=True))
    show(made, f"Bars of the bytes on each GPU, by cause. {told}.{room}")


def who_holds(cut: Mapping[str, Sequence[str]], gpus: int) -> None:
    """A panel for each way, a column for each GPU: which part of each cause it has.

    cut: for each way, the causes that are cut; the others are whole on every GPU.
    """
    causes = ["parameters", "gradients", "optimizer state"]
    made, grid = figure(1, len(cut), width=8.5, height=2.5, sharey=True)
    for axes, (name, parts) in zip(grid, cut.items(), strict=True):
        for row, cause in enumerate(causes):
            for gpu in range(gpus):
                whole = cause not in parts
                axes.add_patch(Rectangle((gpu, row), 0.8, 0.8, fill=False, edgecolor="#BBBBBB"))
                low, height = (row, 0.8) if whole else (row + 0.8 * gpu / gpus, 0.8 / gpus)
                axes.add_patch(Rectangle((gpu, low), 0.8, height, color=_OF_CAUSE[cause]))
        axes.set_xlim(-0.2, gpus)
        axes.set_ylim(len(causes), -0.2)
        axes.set_xticks([gpu + 0.4 for gpu in range(gpus)], [str(gpu) for gpu in range(gpus)])
        axes.set_yticks([row + 0.4 for row in range(len(causes))], causes)
        axes.set_xlabel("GPU")
        axes.grid(visible=False)
        axes.set_title(name, fontweight="bold")
    told = "; ".join(
        f"{name}: cut are {', '.join(parts) if parts else 'none'}" for name, parts in cut.items()
    )
    show(made, f"Which part of what each of {gpus} GPUs holds. {told}; the rest is whole on each.")


def memory_over_step(sizes: Mapping[str, Sequence[int]]) -> None:
    """A curve for each way: the bytes of one GPU after each allocation and release of a step."""
    made, axes = figure(width=8.5, height=3.6)
    colours = [COLOURS[name] for name in ("black", "vermilion", "blue", "green", "purple")]
    for (name, curve), colour in zip(sizes.items(), colours, strict=False):
        places = [index / max(len(curve) - 1, 1) for index in range(len(curve))]
        label = f"{name}: peak {max(curve) / _GIB:.1f} GiB"
        axes.plot(places, [size / _GIB for size in curve], color=colour, label=label, linewidth=1.2)
    axes.set_xlim(0, 1)
    axes.set_ylim(0)
    axes.set_xticks([0, 1], ["the step begins", "it ends"])
    axes.set_ylabel("GiB on one GPU")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    title(axes, "What is whole, and for how long", "bytes counted at each allocation")
    told = ", ".join(f"{name} {max(curve) / _GIB:.1f}" for name, curve in sizes.items())
    show(made, f"Curves of the bytes on one GPU over a training step. Peaks in GiB: {told}.")


def learned(losses: torch.Tensor, vocabulary: int) -> None:
    """The loss over the steps, beside that of a guess among all letters."""
    made, axes = figure(width=7, height=2.8)
    guess = math.log(vocabulary)
    axes.plot(range(1, len(losses) + 1), losses.tolist(), color=COLOURS["blue"])
    axes.axhline(guess, color=COLOURS["grey"], linestyle="--", linewidth=1)
    axes.text(len(losses), guess, "any letter, by chance", ha="right", va="bottom", fontsize=8)
    axes.set_ylim(0, max(guess, losses.max().item()) * 1.12)
    axes.set_xlabel("step")
    axes.set_ylabel("loss a letter, in nats")
    title(axes, "It learns", "measured, mean over the ranks")
    first, last = losses[0].item(), losses[-1].item()
    show(made, f"The loss over {len(losses)} steps falls from {first:.2f} to {last:.2f} a letter.")
