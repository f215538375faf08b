"""Figures of a training run: its curves, the images it gets wrong, and a resume."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from helpers.plots.style import COLOURS, figure, show, title


def learning_curves(history: Sequence[Mapping[str, float]], device: object) -> None:
    """Loss and accuracy over the epochs of one run, side by side.

    history: one record an epoch, with "train_loss", "test_loss" (nats) and "test_accuracy" (0 to 1).
    """
    epochs = range(1, len(history) + 1)
    made, (left, right) = figure(1, 2)
    for name, label, colour in (
        ("train_loss", "training", "blue"),
        ("test_loss", "held out", "orange"),
    ):
        left.plot(epochs, [record[name] for record in history], color=COLOURS[colour], label=label)
    left.set(xlabel="epoch", ylabel="cross-entropy (nats)", yscale="log")
    left.legend()
    title(left, "The loss falls on both", f"measured, {device}")
    percent = [100 * record["test_accuracy"] for record in history]
    right.plot(epochs, percent, color=COLOURS["orange"], marker="o", markersize=4)
    right.axhline(97, color=COLOURS["grey"], linewidth=1, linestyle="--")
    right.annotate("97 %", (1, 97), textcoords="offset points", xytext=(0, 4), color="#666666")
    right.set(xlabel="epoch", ylabel="held-out images right (%)")
    title(right, f"{percent[-1]:.1f} % after {len(history)} epochs", f"measured, {device}")
    first, last = history[0], history[-1]
    show(
        made,
        f"Curves over {len(history)} epochs. Cross-entropy falls from {first['train_loss']:.2f} to "
        f"{last['train_loss']:.2f} nats on the training images and from {first['test_loss']:.2f} to "
        f"{last['test_loss']:.2f} on the held-out ones, of which {percent[0]:.1f} % are right at "
        f"first and {percent[-1]:.1f} % at the end.",
    )


def digit_grid(images: torch.Tensor, titles: Sequence[str], columns: int = 8) -> None:
    """Grey images (N, H, W), uint8 or float, on any device, each under its title."""
    columns = min(columns, max(len(images), 1))
    rows = -(-max(len(images), 1) // columns)
    made, axes = figure(rows, columns, width=1.05 * columns, height=1.3 * rows, squeeze=False)
    for cell in axes.flat:
        cell.set_axis_off()
    # As in ink on paper: the data have bright digits on a dark ground.
    for cell, image, text in zip(axes.flat, images.cpu(), titles, strict=False):
        cell.imshow(image, cmap="gray_r")
        cell.set_title(text, fontsize=9, loc="center")
    titles = list(titles)[: len(images)]
    show(made, f"{len(images)} small grey images in a grid, titled: {'; '.join(titles) or 'none'}.")


def resumed_curves(
    whole: Sequence[float],
    resumed: Mapping[str, Sequence[float]],
    stopped_after: int,
    device: object,
) -> None:
    """An uninterrupted run's loss a step, and those of runs resumed after ``stopped_after`` steps.

    resumed: label → all losses of that run, from the first step on (nats). The lower panel shows
    how far each is from the uninterrupted run.
    """
    made, (above, below) = figure(2, 1, height=4.6, sharex=True)
    above.plot(whole, color="#BBBBBB", linewidth=6, label="never stopped")
    looks: Any = zip(("vermilion", "blue"), ("-", "--"), strict=True)
    for (label, losses), (colour, line) in zip(resumed.items(), looks, strict=False):
        steps = range(stopped_after, len(losses))
        style = {"color": COLOURS[colour], "linestyle": line, "label": label}
        above.plot(steps, losses[stopped_after:], **style)
        off = [abs(losses[step] - whole[step]) for step in steps]
        below.plot(steps, off, **style)
    for axes in (above, below):
        axes.axvline(stopped_after - 0.5, color=COLOURS["grey"], linewidth=1)
    above.set(ylabel="loss (nats)")
    above.legend()
    title(above, "Only the full checkpoint continues the run", f"measured, {device}")
    below.set(xlabel="optimizer step", ylabel="distance (nats)")
    apart = (
        f"{label}: at most {max(abs(a - b) for a, b in zip(losses, whole, strict=True)):.2g} nats"
        for label, losses in resumed.items()
    )
    show(
        made,
        f"Loss over {len(whole)} optimizer steps, and below it the distance from the run that never "
        f"stopped, for runs resumed after step {stopped_after}. {'; '.join(apart)}.",
    )
