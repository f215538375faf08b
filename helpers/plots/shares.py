"""Who received how much of a batch."""

import matplotlib.pyplot as plt
import torch

from helpers.plots.style import COLOURS, figure, headline


def shares(runs: dict[int, list[tuple[torch.device, int]]]) -> None:
    """One panel a run: the samples that each GPU received.

    ``runs`` maps a number of GPUs to ``(device, samples)`` pairs, as noted by a hook. GPUs that
    received nothing are marked with 0.
    """
    made, panels = figure(1, len(runs), width=8.5, height=2.9, sharey=True, squeeze=False)
    for axes, (count, received) in zip(panels[0], runs.items(), strict=True):
        samples = [0] * count
        for device, size in received:
            samples[device.index] += size
        bars = axes.bar(range(count), samples, color=COLOURS["blue"], width=0.7)
        axes.bar_label(bars, fontsize=8 if count > 4 else 9, padding=2)
        axes.set_xticks(range(count))
        axes.set_xlim(-0.8, max(count, 3) - 0.2)
        axes.set_xlabel(f"GPU (of {count})")
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("samples received")
    headline(made, "Every GPU gets a share of the batch", "counted by a hook")
    plt.show()
    plt.close(made)
