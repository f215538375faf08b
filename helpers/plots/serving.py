"""Figures of serving: time of a forward pass by its tokens, latency against throughput, and token times."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from helpers.plots.style import COLORS, SERIES, figure, headline, legend_beside, show, title
from vgpu.units import format_seconds


def forwards(
    times_s: Mapping[int, float], arithmetic_s: Mapping[int, float], memory_s: float
) -> None:
    """Milliseconds of one forward pass by its number of tokens, above the two lines of a roofline.

    ``times_s`` and ``arithmetic_s`` map tokens to seconds; ``memory_s`` is the time to read all weights.
    """
    fig, axes = figure(width=7.5, height=3.6)
    tokens = list(times_s)
    axes.plot(
        tokens,
        [1e3 * times_s[n] for n in tokens],
        "o-",
        color=COLORS["blue"],
        label="a forward pass",
    )
    level: Any = {"color": COLORS["vermilion"], "ls": "--", "lw": 1.5}
    axes.axhline(1e3 * memory_s, **level, label="reading the weights once")
    slope = [1e3 * arithmetic_s[n] for n in tokens]
    axes.plot(tokens, slope, color=COLORS["green"], ls=":", label="arithmetic")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in the forward pass",
        ylabel="one forward pass (ms)",
        ylim=(0.3e3 * memory_s, None),
    )
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.minorticks_off()
    legend_beside(axes, fontsize=9)
    title(axes, "Few tokens are memory-bound, many compute-bound", "virtual time, H100")
    first, last = tokens[0], tokens[-1]
    show(
        fig,
        "Milliseconds of a forward pass by its number of tokens, on logarithmic axes: flat at the time it takes to read "
        f"the weights, then rising with the arithmetic. {first} token: {format_seconds(times_s[first])}; "
        f"{last} tokens: {format_seconds(times_s[last])}.",
    )


def latency_and_throughput(
    curves: Mapping[str, Sequence[tuple[int, float, float]]], message: str, how: str
) -> None:
    """Tokens/s of all sequences over the milliseconds that each waits for its next token.

    ``curves`` maps a name to points of batch, seconds per token and tokens/s; some show their batch.
    """
    fig, axes = figure(width=7.5, height=3.8)
    for (name, points), color in zip(curves.items(), SERIES, strict=False):
        _, waits_s, speeds = zip(*points, strict=True)
        axes.plot([1e3 * s for s in waits_s], speeds, "o-", ms=4, color=color, label=name)
        for batch, wait_s, speed in (points[0], points[len(points) // 2], points[-1]):
            axes.annotate(f" {batch}", (1e3 * wait_s, speed), fontsize=8, color=color, va="top")
    axes.set(xlabel="time per token of each user (ms)", ylabel="tokens/s, all users", yscale="log")
    axes.margins(x=0.1)  # room for the last batch's number
    axes.set_xlim(left=0)
    legend_beside(axes, fontsize=9)
    title(axes, message, how)
    ends = "; ".join(
        f"{name}: batch {points[0][0]} {points[0][2]:,.0f} tokens/s at {format_seconds(points[0][1])}, "
        f"batch {points[-1][0]} {points[-1][2]:,.0f} at {format_seconds(points[-1][1])}"
        for name, points in curves.items()
    )
    show(fig, f"Curves of tokens per second over the time for each token, by batch. {ends}.")


def queues(results: Mapping[str, Mapping[float, tuple[float, float, float]]]) -> None:
    """Three panels over the number of requests per second, with a line for each way to serve.

    ``results`` maps a name to {rate: seconds to the first token, longest gap between tokens, tokens/s};
    the seconds are 95th percentiles over the users.
    """
    fig, panels = figure(1, 3, width=9.5, height=3.4)
    labels = ("time to first token (s)", "longest gap (s)", "tokens/s, all users")
    markers = "osD^"
    for place, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        for (name, by_rate), color, marker in zip(results.items(), SERIES, markers, strict=False):
            rates = list(by_rate)
            values = [by_rate[rate][place] for rate in rates]
            axes.plot(rates, values, marker=marker, ms=4, color=color, label=name)
        axes.set(xlabel="requests/s", ylabel=label)
        if place < 2:
            axes.set_yscale("log")
    legend_beside(panels[-1], fontsize=9)
    headline(
        fig,
        "Static batches keep users waiting, whole prompts interrupt them",
        "virtual time; 95th percentile",
    )
    summary = "; ".join(
        f"{name} at {max(by_rate):g} requests/s: first token {format_seconds(by_rate[max(by_rate)][0])}, "
        f"gap {format_seconds(by_rate[max(by_rate)][1])}, {by_rate[max(by_rate)][2]:,.0f} tokens/s"
        for name, by_rate in results.items()
    )
    show(fig, f"Lines over the rate of requests, one for each way to serve. {summary}.")


def token_times(streams: Mapping[str, Sequence[float]], arrival_s: float) -> None:
    """A tick for each token of one user, in a row for each way to serve; another's prompt as a line.

    ``streams`` maps a name to each token's time in seconds; the other user's long prompt comes at
    ``arrival_s``.
    """
    fig, axes = figure(width=7.5, height=0.9 + 0.45 * len(streams))
    names = list(streams)[::-1]
    for row, name in enumerate(names):
        color = list(SERIES)[row % len(SERIES)]
        axes.plot(
            [1e3 * s for s in streams[name]], [row] * len(streams[name]), "|", ms=14, color=color
        )
    axes.axvline(1e3 * arrival_s, color=COLORS["gray"], ls="--", lw=1)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="ms", ylim=(-0.6, len(names) - 0.4))
    axes.grid(axis="y", visible=False)
    title(
        axes,
        "One user's tokens, while another's long prompt comes in",
        "virtual time; dashed: the prompt arrives",
    )
    longest = {
        name: max(b - a for a, b in itertools.pairwise(times)) for name, times in streams.items()
    }
    summary = ", ".join(f"{name}: {format_seconds(gap_s)}" for name, gap_s in longest.items())
    show(fig, f"Marks for one user's tokens over time. The longest gap between two: {summary}.")
