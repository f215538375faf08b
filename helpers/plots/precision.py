"""Figures for precision: a format's values, errors of sums and casts, losses, scaled values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from helpers.plots.style import (
    COLORS,
    figure,
    legend_beside,
    log2_ticks,
    show,
    text_near,
    title,
)

_ORDER = [COLORS[n] for n in ("black", "gray", "blue", "orange", "green", "vermilion", "purple")]


def formats(
    counts: Mapping[str, Mapping[int, int]], calculated: Mapping[str, int] | None = None
) -> None:
    """Plot how many values each format has per power of two: x shows range, y shows precision.

    ``counts`` maps a format to {exponent e: number of its values from 2^e up to 2^(e + 1)};
    ``calculated`` maps formats with float32's exponents to their number of fraction bits.
    """
    fig, axes = figure(width=8, height=3.8)
    summary = []
    known = {name: _with_8_exponent_bits(bits) for name, bits in (calculated or {}).items()}
    for (name, found), color in zip((known | dict(counts)).items(), _ORDER, strict=False):
        exponents = sorted(found)
        edges = [*exponents, exponents[-1] + 1]
        heights = [found[e] for e in exponents]
        axes.stairs(heights, edges, color=color, linewidth=2, baseline=None)
        most = max(found.values())
        # Where lines are at (nearly) the same height, one line's name goes above it, the other's below.
        side = {"float16": "bottom", "float8 e4m3": "bottom", "float8 e5m2": "top"}.get(
            name, "center"
        )
        axes.text(edges[-1] + 2, most, name, color=color, va=side, fontsize=9)
        summary.append(f"{name}: {most:,} from 2^{exponents[0]} to 2^{edges[-1]}")
    axes.set_yscale("log", base=2)
    axes.set(xlim=(-160, 165), xlabel="magnitude of the value, as a power of 2")
    axes.set_xticks(range(-160, 161, 32), [f"$2^{{{e}}}$" for e in range(-160, 161, 32)])
    axes.set_ylabel("values per power of 2")
    how = "every value counted" + (f"; {' and '.join(known)} calculated" if known else "")
    title(axes, "Exponent bits are width, fraction bits are height", how)
    show(
        fig, f"Step chart of how many values each format has per power of 2. {'; '.join(summary)}."
    )


def _with_8_exponent_bits(fraction_bits: int) -> dict[int, int]:
    normal = {e: 2**fraction_bits for e in range(-126, 128)}
    return {-126 - k: 2 ** (fraction_bits - k) for k in range(1, fraction_bits + 1)} | normal


def number_lines(numbers: Mapping[str, torch.Tensor], most: float) -> None:
    """Draw a number line per format, with a tick at each of its values from 0 to ``most``."""
    fig, axes = figure(width=8, height=0.7 + 0.42 * len(numbers))
    names = list(numbers)[::-1]
    for row, name in enumerate(names):
        values = numbers[name][numbers[name] <= most].tolist()
        axes.vlines([0.0, *values], row - 0.3, row + 0.3, color=COLORS["blue"], linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False)
    axes.set(
        xlim=(-0.02 * most, 1.02 * most),
        xlabel="each mark is a value that the format can represent",
    )
    title(axes, "Dense near zero, sparse farther out", f"every value from 0 to {most:g}")
    held = ", ".join(f"{name} {int((v <= most).sum())}" for name, v in numbers.items())
    show(fig, f"Marks on number lines from 0 to {most:g}, denser toward 0. Values above 0: {held}.")


def errors_by_ranks(errors: Mapping[str, Mapping[int, float]]) -> None:
    """Plot a reduction's relative error by number of ranks, a line for each algorithm and dtype.

    ``errors`` maps a line's name to {ranks: error}.
    """
    fig, axes = figure(width=7.5, height=3.6)
    looks = zip(("vermilion", "blue", "orange", "sky"), ("o-", "s-", "o--", "s--"), strict=True)
    for (name, found), (color, line) in zip(errors.items(), looks, strict=False):
        axes.plot(list(found), list(found.values()), line, color=COLORS[color], ms=4, label=name)
    axes.axhline(0.01, color=COLORS["gray"], linewidth=1, linestyle=":")
    axes.text(2, 0.011, "1%", fontsize=8, color="#666666", va="bottom")
    ring = next(iter(errors.values()))
    ranks, error = max(ring), ring[max(ring)]
    text_near(axes, f"{error:.0%}", (ranks, error), (0, 5), ha="center")
    log2_ticks(axes, sorted(ring))
    axes.set(yscale="log", ylim=(None, 0.2), xlabel="ranks", ylabel="relative error of the sum")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    title(
        axes,
        "In a ring, the error grows with the number of ranks",
        "real gradients, compared with float64",
    )
    summary = "; ".join(
        f"{name}: {found[min(found)]:.1e} on {min(found)} ranks, {found[max(found)]:.1e} on {max(found)}"
        for name, found in errors.items()
    )
    show(fig, f"Line chart of the relative error by number of ranks. {summary}.")


def losses(
    curves: Mapping[str, Sequence[float]], message: str, how: str, *, every: int = 1
) -> None:
    """Plot multiple runs' losses, each recorded once every ``every`` steps.

    Later runs are drawn on top, with thinner lines.
    """
    fig, axes = figure(width=7.5, height=3.2)
    looks: Any = zip(("gray", "blue", "vermilion", "green"), (5, 2.5, 1.8, 1.2), strict=True)
    for (name, curve), (color, width) in zip(curves.items(), looks, strict=False):
        steps = range(every, every * len(curve) + 1, every)
        axes.plot(steps, curve, color=COLORS[color], lw=width, label=name)
    axes.set(xlabel="step", ylabel="loss (nats)")
    axes.legend(fontsize=9)
    title(axes, message, how)
    ends = "; ".join(f"{name} {c[0]:.2f} to {c[-1]:.2f}" for name, c in curves.items())
    show(fig, f"Loss curves over {every * len(next(iter(curves.values())))} steps: {ends}.")


def scaled_numbers(
    scaled: Mapping[str, torch.Tensor], dtype: torch.dtype, message: str, how: str
) -> None:
    """Plot a histogram of each tensor's nonzero values in the range of ``dtype``, on a log axis.

    ``scaled`` maps a name, shown next to the histogram, to the values that are cast to ``dtype``.
    """
    limits = torch.finfo(dtype)
    subnormal, top = math.log2(limits.smallest_normal), math.log2(limits.max)
    fraction_bits = -round(math.log2(limits.eps))
    lowest = subnormal - fraction_bits  # the smallest value above zero
    fig, rows = figure(
        len(scaled), width=8, height=1.2 + 0.95 * len(scaled), sharex=True, squeeze=False
    )
    bins = [edge / 2 for edge in range(-60, 2 * math.ceil(top) + 3)]
    lost = []
    for [axes], (name, values) in zip(rows, scaled.items(), strict=True):
        exponents = values[values != 0].abs().double().log2()
        heights, _ = torch.histogram(exponents.clamp(bins[0]), torch.tensor(bins).double())
        axes.stairs((heights / len(exponents)).tolist(), bins, fill=True, color=COLORS["blue"])
        for left, right, color, label in (
            (bins[0], lowest - 1, "vermilion", "becomes 0"),
            (lowest - 1, subnormal, "orange", "keeps fewer bits"),
            (subnormal, top, "green", f"keeps {fraction_bits} fraction bits"),
        ):
            axes.axvspan(left, right, color=COLORS[color], alpha=0.2, linewidth=0, label=label)
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.set_yticks([])
        axes.grid(visible=False)
        zeros = (exponents < lowest - 1).double().mean().item()
        few = ((exponents >= lowest - 1) & (exponents < subnormal)).double().mean().item()
        lost.append(f"{name or 'the values'}: {zeros:.1%} become 0, {few:.1%} keep fewer bits")
    ticks = [2 * tick for tick in range(-15, math.ceil(top) // 2 + 1)]
    axes.set(xlim=(bins[0], bins[-1]), xlabel="value when it's cast")
    axes.set_xticks(ticks[::2], [f"$2^{{{tick}}}$" for tick in ticks[::2]])
    legend_beside(rows[0][0])
    title(rows[0][0], message, how)
    show(fig, f"Histograms of values by magnitude in the range of {dtype}. {'; '.join(lost)}.")


def errors_by_outlier(errors: Mapping[str, Mapping[int, float]], message: str, how: str) -> None:
    """Plot the other values' error by an outlier's size, on log axes, a line for each way to cast.

    ``errors`` maps a way to cast to {factor: relative error}.
    """
    fig, axes = figure(width=8.5, height=3.4)
    looks = zip(
        ("blue", "sky", "green", "orange", "vermilion"),
        ("o-", "s-", "D-", "v--", "x:"),
        strict=True,
    )
    for (name, found), (color, line) in zip(errors.items(), looks, strict=False):
        axes.plot(list(found), list(found.values()), line, color=COLORS[color], ms=5, label=name)
    axes.set(xscale="log", yscale="log", ylabel="relative error of the other values")
    axes.set_xlabel("factor by which one channel is larger")
    factors = sorted(next(iter(errors.values())))
    axes.set_xticks(factors, [f"{factor:,}" for factor in factors], fontsize=8)
    axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1], ["1%", "3%", "10%", "30%", "100%"])
    axes.minorticks_off()
    legend_beside(axes, fontsize=9)
    title(axes, message, how)
    summary = "; ".join(
        f"{name} " + ", ".join(f"{error:.1%} at {factor:,}" for factor, error in found.items())
        for name, found in errors.items()
    )
    show(
        fig,
        f"Line chart of the other values' error, by the factor by which one channel is larger: {summary}.",
    )
