"""Figures of precision: the numbers of a format, errors of sums, and losses of several runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from helpers.plots.style import COLORS, figure, log2_ticks, show, title

_ORDER = [COLORS[n] for n in ("black", "gray", "blue", "orange", "green", "vermilion", "purple")]


def formats(counts: Mapping[str, Mapping[int, int]]) -> None:
    """Range on the x axis, precision on the y axis: how many numbers each format has per power of two.

    ``counts`` maps a format to {exponent e: how many of its numbers are between 2^e and 2^(e + 1)}.
    """
    fig, axes = figure(width=8, height=3.8)
    summary = []
    for (name, found), color in zip(counts.items(), _ORDER, strict=False):
        exponents = sorted(found)
        edges = [*exponents, exponents[-1] + 1]
        heights = [found[e] for e in exponents]
        axes.stairs(heights, edges, color=color, linewidth=2, baseline=None)
        most = max(found.values())
        # Two have (nearly) the same height: one name goes above its line, the other below.
        side = {"float16": "bottom", "float8 e4m3": "bottom", "float8 e5m2": "top"}.get(
            name, "center"
        )
        axes.text(edges[-1] + 2, most, name, color=color, va=side, fontsize=9)
        summary.append(f"{name}: {most:,} from 2^{exponents[0]} to 2^{edges[-1]}")
    axes.set_yscale("log", base=2)
    axes.set(xlim=(-160, 165), xlabel="size of the number, as a power of 2")
    axes.set_xticks(range(-160, 161, 32), [f"$2^{{{e}}}$" for e in range(-160, 161, 32)])
    axes.set_ylabel("numbers per power of 2")
    title(axes, "Exponent bits are width, fraction bits are height", "every number counted")
    show(fig, f"Lines: how many numbers each format has per power of 2. {'; '.join(summary)}.")


def number_lines(numbers: Mapping[str, torch.Tensor], most: float) -> None:
    """Every number of each format from 0 to ``most``, as a tick on a number line per format."""
    fig, axes = figure(width=8, height=0.7 + 0.42 * len(numbers))
    names = list(numbers)[::-1]
    for row, name in enumerate(names):
        values = numbers[name][numbers[name] <= most].tolist()
        axes.vlines([0.0, *values], row - 0.3, row + 0.3, color=COLORS["blue"], linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False)
    axes.set(xlim=(-0.02 * most, 1.02 * most), xlabel="each mark is a number that the format has")
    title(axes, "Dense near zero, sparse further out", "every number")
    held = ", ".join(f"{name} {int((v <= most).sum())}" for name, v in numbers.items())
    show(fig, f"Marks on lines from 0 to {most:g}, denser toward 0. Numbers above 0: {held}.")


def errors_by_ranks(
    errors: Mapping[str, Mapping[int, float]], measured: Mapping[str, tuple[int, float]]
) -> None:
    """The relative error of a sum by the number of ranks, a line for each way to add.

    ``errors`` maps a way to {ranks: error}; ``measured`` maps a name to the (ranks, error) of real
    all-reduces, drawn as points.
    """
    fig, axes = figure(width=7.5, height=3.6)
    looks = zip(("vermilion", "blue", "orange", "sky"), ("o-", "s-", "o--", "s--"), strict=True)
    for (name, found), (color, line) in zip(errors.items(), looks, strict=False):
        axes.plot(list(found), list(found.values()), line, color=COLORS[color], ms=4, label=name)
    for place, (name, (ranks, error)) in enumerate(measured.items()):
        label = None if place else name.partition(",")[0]
        axes.plot([ranks], [error], "D", color="black", ms=7, mfc="none", mew=2, label=label)
    axes.axhline(0.01, color=COLORS["gray"], linewidth=1, linestyle=":")
    axes.text(2, 0.011, "1 %", fontsize=8, color="#666666", va="bottom")
    log2_ticks(axes, sorted(next(iter(errors.values()))))
    axes.set(yscale="log", xlabel="ranks", ylabel="relative error of the sum")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    title(axes, "In a ring the error grows with the ranks", "real gradients, compared with float64")
    summary = "; ".join(
        f"{name}: {found[min(found)]:.1e} on {min(found)} ranks, {found[max(found)]:.1e} on {max(found)}"
        for name, found in errors.items()
    )
    show(fig, f"Lines of the relative error over the number of ranks. {summary}.")


def losses(curves: Mapping[str, Sequence[float]], message: str, how: str) -> None:
    """The loss over the steps of several runs; later ones are drawn thinner, on top."""
    fig, axes = figure(width=7.5, height=3.2)
    looks: Any = zip(("gray", "blue", "vermilion", "green"), (5, 2.5, 1.8, 1.2), strict=True)
    for (name, curve), (color, width) in zip(curves.items(), looks, strict=False):
        axes.plot(range(1, len(curve) + 1), curve, color=COLORS[color], lw=width, label=name)
    axes.set(xlabel="step", ylabel="loss (nats)")
    axes.legend(fontsize=9)
    title(axes, message, how)
    ends = "; ".join(f"{name} {c[0]:.2f} to {c[-1]:.2f}" for name, c in curves.items())
    show(fig, f"Curves of the loss over {len(next(iter(curves.values())))} steps: {ends}.")


def scaled_numbers(scaled: torch.Tensor, dtype: torch.dtype, message: str) -> None:
    """A histogram of scaled numbers in the range of ``dtype``, on a logarithmic axis, without zeros."""
    limits = torch.finfo(dtype)
    subnormal = math.log2(limits.smallest_normal)
    fraction_bits = -round(math.log2(limits.eps))
    lowest = subnormal - fraction_bits  # the smallest number above zero
    exponents = scaled[scaled != 0].abs().double().log2()
    fig, axes = figure(width=7.5, height=2.6)
    bins = [edge / 2 for edge in range(-60, 2 * math.ceil(math.log2(limits.max)) + 3)]
    heights, _ = torch.histogram(exponents.clamp(bins[0]), torch.tensor(bins).double())
    axes.stairs((heights / len(exponents)).tolist(), bins, fill=True, color=COLORS["blue"])
    for left, right, color, name in (
        (bins[0], lowest - 1, "vermilion", "becomes 0"),
        (lowest - 1, subnormal, "orange", "loses digits"),
        (subnormal, math.log2(limits.max), "green", "all digits"),
    ):
        axes.axvspan(left, right, color=COLORS[color], alpha=0.2, linewidth=0, label=name)
    axes.set(xlabel="scaled number, as a power of 2", ylabel="share of the numbers")
    axes.set(xlim=(bins[0], bins[-1]))
    axes.legend(fontsize=8, loc="upper left")
    title(axes, message, "counted; the scale puts the largest at the right end")
    zeros = (exponents < lowest - 1).double().mean().item()
    few = ((exponents >= lowest - 1) & (exponents < subnormal)).double().mean().item()
    show(fig, f"Numbers by size in {dtype}: {zeros:.1%} become 0, {few:.1%} lose digits.")
