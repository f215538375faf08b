"""Figures for training: a network, learning curves, digit images, resumed runs, step times."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.patches import Rectangle
from torch import nn

from helpers.plots.style import COLORS, SERIES, figure, show, text_near, title
from vgpu.units import format_seconds

_COLORS = {"Conv2d": "blue", "Linear": "vermilion", "MaxPool2d": "green"}


def network(model: nn.Module, inputs: torch.Tensor) -> None:
    """Draw the leaf modules in the order they run on ``inputs``, with shapes and parameters.

    A bar's height is the number of elements in the layer's output for one sample, on a log scale.
    """
    layers = _run(model, inputs)
    fig, axes = figure(width=8.5, height=3.3)
    values = [inputs[0].numel(), *(torch.Size(shape[1:]).numel() for _, shape, _ in layers)]
    names = ["input", *(name for name, _, _ in layers)]
    shapes = [inputs.shape, *(shape for _, shape, _ in layers)]
    counts = [0, *(count for _, _, count in layers)]
    for x, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        color = COLORS[_COLORS.get(name, "gray")]
        axes.add_patch(Rectangle((x - 0.38, 1), 0.76, values[x] - 1, color=color))
        size = " × ".join(map(str, shape[1:]))
        axes.text(x, values[x] * 1.15, size, ha="center", va="bottom", fontsize=8)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(1, max(values) * 3), yscale="log")
    labels = [
        f"{name} ({count:,})" if count else name for name, count in zip(names, counts, strict=True)
    ]
    axes.set_xticks(range(len(names)), labels, rotation=30, ha="right", fontsize=9)
    axes.set_ylabel("elements for one image")
    total = sum(parameter.numel() for parameter in model.parameters())
    title(
        axes,
        f"{type(model).__name__}: {total:,} parameters",
        "shapes in one forward pass; in parentheses: the layer's parameters",
    )
    steps = zip(names, shapes, strict=True)
    chain = ", ".join(f"{name} {'×'.join(map(str, shape[1:]))}" for name, shape in steps)
    show(
        fig,
        f"The network's layers from left to right, each with its output shape: {chain}.",
    )


def _run(model: nn.Module, inputs: torch.Tensor) -> list[tuple[str, torch.Size, int]]:
    """Return each leaf module's name, output shape and number of parameters, in execution order."""
    layers: list[tuple[str, torch.Size, int]] = []

    def note(module: nn.Module, _: object, output: torch.Tensor) -> None:
        count = sum(parameter.numel() for parameter in module.parameters())
        layers.append((type(module).__name__, output.shape, count))

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(note) for module in leaves]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def learning_curves(history: Sequence[Mapping[str, float]], device: object) -> None:
    """Plot the loss and accuracy over the epochs of one run, side by side.

    ``history`` has one record per epoch, with "train_loss", "test_loss" (nats) and "test_accuracy"
    (0 to 1).
    """
    epochs = range(1, len(history) + 1)
    fig, (left, right) = figure(1, 2)
    for name, label, color in (
        ("train_loss", "training", "blue"),
        ("test_loss", "held out", "orange"),
    ):
        left.plot(epochs, [record[name] for record in history], color=COLORS[color], label=label)
    left.set(xlabel="epoch", ylabel="cross-entropy (nats)", yscale="log")
    left.legend()
    title(left, "Both losses fall", f"measured, {device}")
    percent = [100 * record["test_accuracy"] for record in history]
    right.plot(epochs, percent, color=COLORS["orange"], marker="o", markersize=4)
    right.axhline(97, color=COLORS["gray"], linewidth=1, linestyle="--")
    text_near(right, "goal: 97%", (len(history), 97), (0, -12), ha="right", color="#666666")
    right.set(xlabel="epoch", ylabel="held-out accuracy (%)")
    title(right, f"{percent[-1]:.1f}% after {len(history)} epochs", f"measured, {device}")
    first, last = history[0], history[-1]
    show(
        fig,
        f"Two line charts over {len(history)} epochs. Cross-entropy falls from {first['train_loss']:.2f} to "
        f"{last['train_loss']:.2f} nats on the training images and from {first['test_loss']:.2f} to "
        f"{last['test_loss']:.2f} on the held-out ones. Held-out accuracy goes from "
        f"{percent[0]:.1f}% to {percent[-1]:.1f}%.",
    )


def digit_grid(images: torch.Tensor, titles: Sequence[str]) -> None:
    """Show grayscale images (N, H, W), uint8 or float, on any device, each under its title."""
    columns = min(8, max(len(images), 1))
    rows = -(-max(len(images), 1) // columns)
    fig, axes = figure(rows, columns, width=1.05 * columns, height=1.3 * rows, squeeze=False)
    for cell in axes.flat:
        cell.set_axis_off()
    # Draw digits like ink on paper; in the data, they are bright on a dark background.
    for cell, image, text in zip(axes.flat, images.cpu(), titles, strict=False):
        cell.imshow(image, cmap="gray_r")
        cell.set_title(text, fontsize=9, loc="center")
    titles = list(titles)[: len(images)]
    show(
        fig,
        f"{len(images)} small grayscale images in a grid, titled: {'; '.join(titles) or 'none'}.",
    )


def resumed_curves(
    whole: Sequence[float],
    resumed: Mapping[str, Sequence[float]],
    stopped_after: int,
    device: object,
) -> None:
    """Plot the losses of an uninterrupted run, and of runs resumed after ``stopped_after`` steps.

    The plot starts five steps before the stop. ``resumed`` maps a label to all of that run's losses
    in nats, from the first step on. The lower panel shows each run's distance from the
    uninterrupted run.
    """
    fig, (above, below) = figure(2, 1, height=4.6, sharex=True)
    shown = range(max(0, stopped_after - 5), len(whole))
    above.plot(shown, whole[shown.start :], color="#BBBBBB", linewidth=6, label="uninterrupted")
    looks: Any = zip(("vermilion", "blue"), ("-", "--"), strict=True)
    for (label, losses), (color, line) in zip(resumed.items(), looks, strict=False):
        steps = range(stopped_after, len(losses))
        style = {"color": COLORS[color], "linestyle": line}
        above.plot(steps, losses[stopped_after:], **style, label=label)
        off = [abs(losses[step] - whole[step]) for step in steps]
        below.plot(steps, off, **style, label=label if any(off) else f"{label}: exactly 0")
    stop = {"x": stopped_after - 0.5, "color": "#555555", "linewidth": 1}
    above.axvline(**stop, label="stopped here")
    below.axvline(**stop)
    above.set(ylabel="loss (nats)")
    above.legend()
    below.legend(loc="upper left")
    title(above, "Only the full checkpoint continues the run", f"measured, {device}")
    below.set(xlabel="optimizer step", ylabel="distance (nats)")
    apart = (
        f"{label}: at most {max(abs(a - b) for a, b in zip(losses, whole, strict=True)):.2g} nats"
        for label, losses in resumed.items()
    )
    show(
        fig,
        f"Loss over {len(whole)} optimizer steps, and below it the distance from the uninterrupted "
        f"run, for runs resumed after step {stopped_after}. {'; '.join(apart)}.",
    )


def first_to_differ(apart: Mapping[str, Sequence[float]], device: object) -> None:
    """Draw a row of cells per lost part: how far off each loss after the stop is (white: not at all).

    ``apart`` maps a part to the distances in nats. Rows that differ sooner are higher.
    """
    same = {part: [*map(bool, off), True].index(True) for part, off in apart.items()}
    parts = sorted(apart, key=lambda part: same[part])
    fig, axes = figure(width=6.5, height=0.9 + 0.4 * len(parts))
    for row, part in enumerate(parts):
        for column, off in enumerate(apart[part]):
            color = COLORS["vermilion"] if off else "white"
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="#BBBBBB"))
            text = f"{off:.3f}" if off else "0"
            place = column + 0.5, row + 0.5
            ink = "white" if off else "black"
            axes.text(*place, text, ha="center", va="center", fontsize=9, color=ink)
    count = max(map(len, apart.values()))
    axes.set(xlim=(0, count), ylim=(len(parts), 0), xlabel="loss after the stop")
    axes.set_xticks([column + 0.5 for column in range(count)], range(1, count + 1))
    axes.set_yticks([row + 0.5 for row in range(len(parts))], [f"without {part}" for part in parts])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    title(
        axes,
        "A lost part shows up sooner, later, or never",
        f"distance in nats, measured, {device}",
    )
    each = "; ".join(
        f"without {part}, "
        + (
            "no loss differs"
            if same[part] == len(apart[part])
            else f"from loss {same[part] + 1} on"
        )
        for part in parts
    )
    show(fig, f"A row of cells for each lost part, filled where the loss differs: {each}.")


def learned(losses: torch.Tensor, vocabulary: int) -> None:
    """Plot the loss over the steps, and the loss of a uniform guess among all characters."""
    fig, axes = figure(width=7, height=2.8)
    guess = math.log(vocabulary)
    axes.plot(range(1, len(losses) + 1), losses.tolist(), color=COLORS["blue"])
    axes.axhline(guess, color=COLORS["gray"], linestyle="--", linewidth=1)
    axes.text(len(losses), guess, "uniform guess", ha="right", va="bottom", fontsize=8)
    axes.set(
        ylim=(0, max(guess, losses.max().item()) * 1.12),
        xlabel="step",
        ylabel="loss per character, in nats",
    )
    title(axes, "It learns", "measured, mean over the ranks")
    first, last = losses[0].item(), losses[-1].item()
    show(
        fig,
        f"The loss over {len(losses)} steps falls from {first:.2f} to {last:.2f} per character.",
    )


def by_batch(learned: Mapping[tuple[str, int], Sequence[float]]) -> None:
    """Plot the final loss by batch size, for each way to set the learning rate, after the same epochs.

    ``learned`` maps (way, batch size) to the losses with different seeds.
    """
    fig, axes = figure(width=7.5, height=3.4)
    batches = sorted({batch for _, batch in learned})
    ways = list(dict.fromkeys(way for way, _ in learned))
    for place, (way, color) in enumerate(zip(ways, SERIES, strict=False)):
        points = [(batches.index(b), losses) for (w, b), losses in learned.items() if w == way]
        where = [index + 0.12 * (place - 1) for index, _ in points]
        axes.plot(where, [statistics.mean(losses) for _, losses in points], color=color, label=way)
        for at, (_, losses) in zip(where, points, strict=True):
            axes.plot([at] * len(losses), losses, "o", color=color, ms=4)
    axes.set(yscale="log", xlabel="batch size")
    axes.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axes.set_ylabel("loss after the last epoch")
    axes.legend(title="learning rate", loc="upper left", fontsize=9)
    title(
        axes,
        "A larger batch needs a larger learning rate, up to a point",
        "measured; points: single seeds, shifted sideways to tell them apart",
    )
    summary = "; ".join(
        f"batch size {batch}, rate {way}: {statistics.mean(losses):.2f}"
        for (way, batch), losses in learned.items()
    )
    show(fig, f"Loss by batch size, a line for each way to set the learning rate. {summary}.")


def repeated_times(times_s: Mapping[str, Sequence[float]]) -> None:
    """Plot repeated times, a row per name: repeats, their median (square) and quartiles (bar).

    ``times_s`` maps a name to the seconds of each repeat of one step, at least two.
    """
    fig, axes = figure(width=7.5, height=1.3 + 0.6 * len(times_s))
    summary = []
    for row, (name, repeats_s) in enumerate(times_s.items()):
        repeats_ms = [1e3 * time_s for time_s in repeats_s]
        axes.plot(repeats_ms, [row - 0.22] * len(repeats_ms), "o", color=COLORS["sky"], ms=5)
        low, middle, high = statistics.quantiles(repeats_ms)
        axes.plot([low, high], [row + 0.12] * 2, color=COLORS["vermilion"], linewidth=4)
        axes.plot([middle], [row + 0.12], "s", color=COLORS["vermilion"], ms=8)
        quartiles = f"{format_seconds(low / 1e3)} to {format_seconds(high / 1e3)}"
        summary.append(f"{name}: median {format_seconds(middle / 1e3)}, quartiles {quartiles}")
    axes.set_yticks(range(len(times_s)), list(times_s))
    axes.set_ylim(len(times_s) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("one step (ms)")
    title(axes, "One step, repeated", "measured on this machine; square: median; bar: quartiles")
    show(fig, f"Dot plot of every repeat. {'; '.join(summary)}.")
