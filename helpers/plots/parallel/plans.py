"""A planned training: speed over GPUs, goodput over checkpoints, loss over batches, time over bytes."""

import statistics
from collections.abc import Mapping, Sequence

from helpers.plots.style import COLOURS, figure, show, title
from vgpu.units import format_bytes, format_seconds

_IN_TURN = [COLOURS[name] for name in ("blue", "orange", "green", "purple")]


def same_batch(speeds: Mapping[str, Mapping[int, float]], tokens: Mapping[int, int]) -> None:
    """Million tokens/s over the number of GPUs, a line for each network; dotted, in proportion.

    tokens: for each number of GPUs, those that one of them has in a step.
    """
    made, axes = figure(width=7.5, height=3.6)
    counts = list(tokens)
    first = next(iter(speeds.values()))[counts[0]]
    axes.plot(counts, [first * n / counts[0] for n in counts], color=COLOURS["grey"], ls=":", lw=1)
    for (name, found), colour in zip(speeds.items(), _IN_TURN, strict=False):
        axes.plot(counts, [found[n] for n in counts], "o-", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs, and tokens that each has in a step")
    axes.set_xticks(counts, [f"{n}\n{tokens[n]:,}" for n in counts])
    doublings = [first / 2 * 2**k for k in range(1, 1 + (counts[-1] // counts[0]).bit_length())]
    axes.set_yticks(doublings, [f"{speed:.3g}" for speed in doublings])
    axes.minorticks_off()
    axes.set_ylabel("million tokens/s, all GPUs")
    axes.legend(loc="upper left", fontsize=9)
    title(axes, "More GPUs, the same batch", "virtual time; dotted: in proportion to the GPUs")
    told = "; ".join(
        f"{name}: {found[counts[0]]:.2f} on {counts[0]} GPUs, {found[counts[-1]]:.2f} on {counts[-1]}"
        for name, found in speeds.items()
    )
    show(made, f"Lines of million tokens per second over GPUs, on logarithmic axes. {told}.")


def goodput(
    found: Mapping[int, Mapping[float, tuple[float, float]]], best_s: Mapping[int, float]
) -> None:
    """The share of time that lasts, over the interval between checkpoints, for numbers of GPUs.

    found: GPUs → {interval in seconds: (by formula, simulated)}. best_s: GPUs → the square root.
    """
    made, axes = figure(width=7.5, height=3.4)
    for (gpus, points), colour in zip(found.items(), _IN_TURN, strict=False):
        minutes = [interval_s / 60 for interval_s in points]
        axes.plot(minutes, [f for f, _ in points.values()], color=colour, label=f"{gpus:,} GPUs")
        axes.plot(minutes, [s for _, s in points.values()], "o", color=colour, ms=4)
        axes.axvline(best_s[gpus] / 60, color=colour, ls="--", lw=1)
    axes.set(xscale="log", xlabel="minutes of training between two checkpoints", ylim=(0, 1))
    axes.set_xticks(minutes, [f"{m:g}" for m in minutes])
    axes.minorticks_off()
    axes.set_ylabel("share of time that lasts")
    axes.legend(loc="lower center", fontsize=9)
    title(
        axes,
        "Too often costs writing, too seldom costs repeating",
        "lines: Daly's formula; points: simulated failures; dashed: the square root",
    )
    told = "; ".join(
        f"with {gpus:,} GPUs it is highest near {format_seconds(best_s[gpus])}, at "
        f"{max(f for f, _ in points.values()):.0%}, and {points[max(points)][0]:.0%} at the longest"
        for gpus, points in found.items()
    )
    show(made, f"Curves of the share of time that lasts over the checkpoint interval: {told}.")


def by_batch(learned: Mapping[tuple[str, int], Sequence[float]]) -> None:
    """The loss after as many epochs, for each way to choose the rate and each batch.

    learned: (way, batch) → the losses of several seeds.
    """
    made, axes = figure(width=7.5, height=3.4)
    batches = sorted({batch for _, batch in learned})
    ways = list(dict.fromkeys(way for way, _ in learned))
    for place, (way, colour) in enumerate(zip(ways, _IN_TURN, strict=False)):
        points = [(batches.index(b), losses) for (w, b), losses in learned.items() if w == way]
        where = [index + 0.12 * (place - 1) for index, _ in points]
        axes.plot(where, [statistics.mean(losses) for _, losses in points], color=colour, label=way)
        for at, (_, losses) in zip(where, points, strict=True):
            axes.plot([at] * len(losses), losses, "o", color=colour, ms=4)
    axes.set(yscale="log", xlabel="batch")
    axes.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axes.set_ylabel("loss after the last epoch")
    axes.legend(title="learning rate", loc="upper left", fontsize=9)
    title(axes, "A larger batch wants a larger rate, up to a point", "measured; points: seeds")
    told = "; ".join(
        f"batch {batch}, rate {way}: {statistics.mean(losses):.2f}"
        for (way, batch), losses in learned.items()
    )
    show(made, f"Loss over batch size, a line for each way to choose the rate. {told}.")


def latency_and_bandwidth(measured: Mapping[int, float], expected: Mapping[int, float]) -> None:
    """Seconds of an all-reduce over its bytes: points as measured, a line of the two numbers."""
    made, axes = figure(width=7.5, height=3.4)
    sizes = list(measured)
    axes.plot(
        sizes, list(expected.values()), color=COLOURS["orange"], label="latency + bytes / bandwidth"
    )
    axes.plot(sizes, list(measured.values()), "o", color=COLOURS["blue"], label="measured")
    axes.set(xscale="log", yscale="log", xlabel="bytes of each rank", ylabel="seconds")
    axes.set_xticks(sizes[::2], [format_bytes(size) for size in sizes[::2]])
    axes.minorticks_off()
    axes.legend(loc="upper left", fontsize=9)
    title(axes, "First the latency, then the bytes", "all-reduce of two processes, measured here")
    told = ", ".join(
        f"{format_bytes(size)} {format_seconds(measured[size])}" for size in sizes[::2]
    )
    show(made, f"Points of an all-reduce's time over its bytes, flat and then rising: {told}.")
