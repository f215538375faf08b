"""Figures for serving: a growing cache, what fits, latency against throughput, and token times."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, NullLocator

from helpers.plots.memory import CAUSE_COLORS
from helpers.plots.style import (
    COLORS,
    SERIES,
    arrow,
    figure,
    headline,
    legend_beside,
    show,
    text_near,
    title,
)
from vgpu.units import format_bytes, format_seconds


def _label_decades(axes: Any) -> None:
    """Label 1, 2 and 5 of each decade on a logarithmic y axis."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_locator(NullLocator())


def cache_steps(prompt: str, answer: str) -> None:
    """Draw a row for each forward pass: its input letters, those in the cache, and the next one.

    The first pass takes all of ``prompt``; each later one takes the latest letter of ``answer``.
    """
    widest = len(prompt) + len(answer) - 1
    cached, out = len(prompt) + 2, len(prompt) + widest + 4  # where the columns start
    fig, axes = figure(width=8.0, height=0.9 + 0.42 * len(answer))

    def cell(x: float, row: int, letter: str, color: str) -> None:
        axes.add_patch(Rectangle((x, row), 0.9, 0.7, facecolor=color, edgecolor="#444444", lw=0.8))
        axes.text(x + 0.45, row + 0.36, letter.replace(" ", "␣"), ha="center", va="center")

    for row, letter in enumerate(answer):
        known = 0 if row == 0 else len(prompt) + row - 1
        new = prompt if row == 0 else answer[row - 1]
        for place, one in enumerate(new):
            cell(place, row, one, COLORS["sky"])
        for place, one in enumerate((prompt + answer)[: known + len(new)]):
            cell(cached + place, row, one, "#E5E5E5" if place < known else COLORS["green"])
        cell(out, row, letter, COLORS["orange"])
        axes.text(-0.5, row + 0.36, "decoding" if row else "prefill", ha="right", va="center")
        arrow(axes, (len(new) + 0.2, row + 0.36), (cached - 0.4, row + 0.36))
        arrow(axes, (cached + known + len(new) + 0.2, row + 0.36), (out - 0.4, row + 0.36))
    for x, name in (
        (0, "input letters"),
        (cached, "keys and values in the cache"),
        (out, "next letter"),
    ):
        axes.text(x, -0.35, name, fontsize=9, color="#666666")
    axes.set(xlim=(-3.5, out + 3.5), ylim=(len(answer), -0.7))
    axes.axis("off")
    title(
        axes,
        "Each new letter adds a position to the cache",
        "green: just added; gray: from earlier passes",
    )
    show(
        fig,
        f"A row for each forward pass. Prefill takes the {len(prompt)} letters of {prompt!r} "
        f"and caches them; each of {len(answer) - 1} decoding passes takes only the latest "
        f"letter and adds it to the cache. The next letters are {', '.join(answer)}.",
    )


def memory_of_servers(
    held: Mapping[str, Mapping[str, tuple[float, float]]], usable_bytes: float, message: str
) -> None:
    """Plot the bytes of weights and cache per GPU: a bar for each server and dtype, and the limit.

    ``held`` maps a server to its dtypes, and each dtype to (weight bytes, cache bytes).
    """
    causes, gib = ("parameters", "KV cache"), 2**30
    fig, axes = figure(width=8.5, height=1.2 + 0.6 * len(held))
    places, names, colors = [], [], []
    for row, (server, by_format) in enumerate(held.items()):
        for place, (name, sizes) in enumerate(by_format.items()):
            y, left = row + 0.36 * place - 0.18, 0.0
            for cause, size in zip(causes, sizes, strict=True):
                axes.barh(y, size / gib, 0.32, left, color=CAUSE_COLORS[cause])
                left += size / gib
            places.append(y)
            names.append(f"{server}, {name}: {left:.0f} GiB")
            colors.append(COLORS["black" if sum(sizes) <= usable_bytes else "vermilion"])
    axes.axvline(usable_bytes / gib, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(places, names, fontsize=9)
    for label, color in zip(axes.get_yticklabels(), colors, strict=True):
        label.set_color(color)
    axes.set(ylim=(len(held) - 0.5, -0.5), xlabel="GiB on each GPU")
    axes.grid(axis="y", visible=False)
    named = zip(("weights", "KV cache"), causes, strict=True)
    handles = [Patch(color=CAUSE_COLORS[cause], label=name) for name, cause in named]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    room = format_bytes(usable_bytes)
    title(
        axes,
        message,
        f"per GPU, computed from sizes; dashed: the {room} that may be used; orange: over it",
    )
    summary = "; ".join(
        f"{name}, {kind}: {format_bytes(sum(sizes))}"
        for name, by_format in held.items()
        for kind, sizes in by_format.items()
    )
    show(
        fig,
        f"Stacked bars of weights and cache on each GPU, {room} of which may be used. {summary}.",
    )


def forwards(
    times_s: Mapping[int, float], arithmetic_s: Mapping[int, float], memory_s: float, what: str
) -> None:
    """Plot a forward pass's time by its number of tokens, with the two lines of a roofline.

    ``times_s`` and ``arithmetic_s`` map tokens to seconds; ``memory_s`` is the time to read all
    weights. ``what`` names the model and its GPUs.
    """
    fig, axes = figure(width=7.5, height=3.6)
    tokens = list(times_s)
    axes.plot(
        tokens,
        [1e3 * times_s[n] for n in tokens],
        "o-",
        color=COLORS["blue"],
        label="one forward pass",
    )
    level: Any = {"color": COLORS["vermilion"], "ls": "--", "lw": 1.5}
    axes.axhline(1e3 * memory_s, **level, label="reading the weights once")
    slope = [1e3 * arithmetic_s[n] for n in tokens]
    axes.plot(tokens, slope, color=COLORS["green"], ls=":", label="arithmetic")
    crossing = tokens[0] * memory_s / arithmetic_s[tokens[0]]  # arithmetic grows with the tokens
    axes.plot([crossing], [1e3 * memory_s], "o", ms=7, mfc="white", color=COLORS["black"], zorder=3)
    text_near(axes, f"{crossing:.0f} tokens", (crossing, 1e3 * memory_s), (7, -13), fontsize=9)
    text_near(axes, "decoding", (tokens[0], 1e3 * times_s[tokens[0]]), (-3, 8), fontsize=9)
    text_near(axes, "prefill", (tokens[-1], 1e3 * times_s[tokens[-1]]), (-46, -3), fontsize=9)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in the forward pass",
        ylabel="one forward pass (ms)",
        ylim=(0.3e3 * memory_s, None),
    )
    axes.set_xticks(tokens[::2], [str(n) for n in tokens[::2]])
    axes.minorticks_off()
    _label_decades(axes)
    legend_beside(axes, fontsize=9)
    title(
        axes,
        "Small passes are memory-bound, large ones compute-bound",
        f"virtual time, {what}",
    )
    first, last = tokens[0], tokens[-1]
    show(
        fig,
        "Time of a forward pass by its number of tokens, on logarithmic axes: flat at the time it "
        f"takes to read the weights, then rising with the arithmetic. The two take equally long at "
        f"{crossing:.0f} tokens. {first} token: "
        f"{format_seconds(times_s[first])}; {last} tokens: {format_seconds(times_s[last])}.",
    )


def latency_and_throughput(
    curves: Mapping[str, Sequence[tuple[int, float, float]]],
    message: str,
    how: str,
    bends: Sequence[tuple[float, str]] = (),
    marked: int | None = None,
) -> None:
    """Plot the tokens/s of all users against the time per token for each user.

    ``curves`` maps a name to (batch size, seconds per token, tokens/s) points, up to the largest
    batch that fits, which is labeled. ``bends`` has one pair per curve: the batch size to mark with
    a bar, and what takes as long there as reading the weights. Points with ``marked`` sequences are
    circled.
    """
    fig, axes = figure(width=7.5, height=3.8)
    for (name, points), color in zip(curves.items(), SERIES, strict=False):
        _, waits_s, speeds = zip(*points, strict=True)
        axes.plot([1e3 * s for s in waits_s], speeds, "o-", ms=4, color=color, label=name)
        batch, wait_s, speed = points[-1]
        look: Any = {"color": color, "fontsize": 8}
        text_near(axes, f"{batch}: full", (1e3 * wait_s, speed), (9, 0), **look, va="center")
    above_first = itertools.chain([9], itertools.repeat(-25))  # the first curve is the highest
    for points, (bend, what), color, offset in zip(
        curves.values(), bends, SERIES, above_first, strict=False
    ):
        for (small, *low), (large, *high) in itertools.pairwise(points):
            if small <= bend < large:
                share = math.log(bend / small) / math.log(large / small)
                x, y = (a * (b / a) ** share for a, b in zip(low, high, strict=True))
                axes.plot(1e3 * x, y, "|", ms=16, mew=2, color="black")
                look = {"color": color, "fontsize": 8}
                label = f"{bend:.0f} users: {what}\ntakes as long as the weights"
                text_near(axes, label, (1e3 * x, y), (5, offset), **look)
    circled = [
        (1e3 * s, speed) for points in curves.values() for n, s, speed in points if n == marked
    ]
    if circled:
        ring: Any = {"ms": 11, "mfc": "none", "mew": 1.5, "color": "black", "ls": ""}
        axes.plot(*zip(*circled, strict=True), "o", **ring, label=f"{marked} users")
    highest = next(iter(curves.values()))
    for batch, wait_s, speed in highest:
        if batch in (8, 128):
            look = {"fontsize": 8, "ha": "right", "color": SERIES[0]}
            axes.annotate(f"{batch} users  ", (1e3 * wait_s, speed), va="bottom", **look)
    first = highest[0]  # the curves start at almost the same point
    place = 1e3 * first[1], first[2]
    axes.annotate("1 user  ", place, fontsize=8, ha="right", va="center")
    axes.set(xlabel="time per token for each user (ms)", ylabel="tokens/s, all users", yscale="log")
    _label_decades(axes)
    axes.margins(x=0.25, y=0.15)  # room for the labels
    axes.set_xlim(left=0)
    legend_beside(axes, fontsize=9)
    title(axes, message, how)
    ends = "; ".join(
        f"{name}: batch {points[0][0]} {points[0][2]:,.0f} tokens/s at {format_seconds(points[0][1])}, "
        f"batch {points[-1][0]} {points[-1][2]:,.0f} at {format_seconds(points[-1][1])}"
        for name, points in curves.items()
    )
    bars = "".join(
        f" Bar at {bend:.0f} users: {what} takes as long as reading the weights."
        for bend, what in bends
    )
    show(
        fig, f"Line chart of tokens per second against time per token, by batch size. {ends}.{bars}"
    )


def queues(results: Mapping[str, Mapping[float, tuple[float, float, float]]], where: str) -> None:
    """Plot time to first token and longest gap by requests/s, a line for each way to serve.

    ``results`` maps a name to {rate: (seconds to the first token, longest gap between tokens in
    seconds, tokens/s)}; the times are 95th percentiles over the users. The tokens/s aren't drawn.
    ``where`` names the GPUs that each way has.
    """
    fig, panels = figure(1, 2, width=9.4, height=3.4)
    fig.set_layout_engine(
        "constrained", wspace=0.08
    )  # keeps the right panel's label off the left panel
    labels = ("time to first token (s)", "longest gap between tokens (s)")
    markers = "osD^"
    for place, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        for (name, by_rate), color, marker in zip(results.items(), SERIES, markers, strict=False):
            rates = list(by_rate)
            values = [by_rate[rate][place] for rate in rates]
            axes.plot(rates, values, marker=marker, ms=4, color=color, label=name)
        axes.set(xlabel=f"requests/s on {where}", ylabel=label, yscale="log", xlim=(0, None))
        _label_decades(axes)
    legend_beside(panels[-1], fontsize=9)
    headline(
        fig,
        "Long waits with static batches, long gaps with whole prompts",
        "virtual time, 95th percentile over users",
    )
    summary = "; ".join(
        f"{name} at {max(by_rate):g} requests/s: first token {format_seconds(by_rate[max(by_rate)][0])}, "
        f"longest gap {format_seconds(by_rate[max(by_rate)][1])}"
        for name, by_rate in results.items()
    )
    show(fig, f"Line charts by request rate, a line for each way to serve. {summary}.")


def predicted_and_published(rows: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """Plot predicted over published tokens/s, a row for each configuration, with a band of 25%.

    ``rows`` maps a series to its rows, and each row's name to (predicted, published) tokens/s.
    """
    count = sum(len(series) for series in rows.values())
    fig, axes = figure(width=8.0, height=1.0 + 0.2 * count)
    axes.axvspan(0.75, 1.25, color="#E5E5E5")
    axes.axvline(1, color="#666666", lw=1)
    names: list[str] = []
    for (label, series), color, marker in zip(rows.items(), SERIES, "osD^", strict=False):
        shares = [predicted / published for predicted, published in series.values()]
        places = range(len(names), len(names) + len(series))
        axes.plot(shares, places, marker, ms=5, color=color, label=label)
        names += [f"{name}: {published:,.6g}" for name, (_, published) in series.items()]
    axes.set_yticks(range(count), names, fontsize=8)
    axes.set(xlim=(0.5, 1.5), ylim=(count - 0.4, -0.6), xlabel="predicted over published")
    axes.set_ylabel("model, tokens in and out: published tokens/s")
    legend_beside(axes, fontsize=9)
    title(
        axes,
        "From datasheets to tokens per second",
        "predicted: virtual time; gray: within 25%",
    )
    summary = "; ".join(
        f"{name}: "
        + ", ".join(f"{found:,.0f} against {said:,.0f}" for found, said in series.values())
        for name, series in rows.items()
    )
    show(
        fig,
        f"Dot plot of predicted over published tokens/s. Predicted against published: {summary}.",
    )


def token_times(streams: Mapping[str, Sequence[float]], arrival_s: float, prompt: int) -> None:
    """Draw a tick for each of one user's tokens, with a row for each way to serve.

    ``streams`` maps a name to the tokens' times in seconds. A dashed line marks ``arrival_s``, when
    another user's prompt of ``prompt`` tokens arrives.
    """
    fig, axes = figure(width=7.5, height=0.9 + 0.45 * len(streams))
    names = list(streams)
    # The same colors as in ``queues``, where static batches come first.
    for row, (times, color) in enumerate(zip(streams.values(), SERIES[1:], strict=False)):
        axes.plot(list(times), [row] * len(times), "|", ms=14, color=color)
    axes.axvline(arrival_s, color=COLORS["gray"], ls="--", lw=1)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="seconds", ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    title(
        axes,
        "One user's tokens while another's long prompt arrives",
        f"virtual time; dashed: the prompt of {prompt:,} tokens arrives",
    )
    longest = {
        name: max(b - a for a, b in itertools.pairwise(times)) for name, times in streams.items()
    }
    summary = ", ".join(f"{name}: {format_seconds(gap_s)}" for name, gap_s in longest.items())
    show(fig, f"Marks for one user's tokens over time. Longest gaps between two tokens: {summary}.")
