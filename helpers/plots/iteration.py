"""One training step: each GPU's bytes after every part of it, by cause."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch

from helpers.memory import OTHER, Snapshot
from helpers.plots.style import COLOURS, figure, headline

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


def iteration(steps: Sequence[Snapshot]) -> None:
    """A panel for each GPU: one stacked bar after each step, MiB by cause."""
    gpus = list(steps[-1].by_cause)
    made, panels = figure(len(gpus), 1, width=8, height=2.1 * len(gpus), sharex=True, sharey=True)
    for gpu, axes in zip(gpus, panels, strict=True):
        bottom = [0.0] * len(steps)
        for cause in steps[-1].by_cause[gpu]:
            sizes = [step.by_cause[gpu].get(cause, 0) / _MIB for step in steps]
            axes.bar(range(len(steps)), sizes, 0.7, bottom, color=_OF_CAUSE[cause], label=cause)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        axes.set_ylabel(f"{gpu}\nMiB")
        axes.grid(axis="x", visible=False)
    panels[-1].set_xticks(range(len(steps)), [_two_lines(step.step) for step in steps], fontsize=8)
    panels[0].legend(loc="upper left", ncols=2, fontsize=8)
    headline(made, "GPU 0 carries what the others do not", "bytes counted after each step")
    plt.show()
    plt.close(made)


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
    plt.show()
    plt.close(made)


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
    plt.show()
    plt.close(made)


def _two_lines(step: str) -> str:
    number, _, words = step.partition(" ")
    first, _, rest = words.partition(" ")
    return f"{number} {first}\n{rest}"
