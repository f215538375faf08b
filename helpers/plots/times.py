"""Figures for times, their parts, and speeds, by split size, width, number of GPUs and interval."""

from collections.abc import Mapping, Sequence
from typing import Any

from helpers.plots.style import (
    COLORS,
    SERIES,
    figure,
    headline,
    legend_beside,
    log2_ticks,
    show,
    stacked_bars,
    text_near,
    title,
)
from vgpu import Timeline, covered_s
from vgpu.units import format_seconds


def split_sizes(
    predicted_s: Mapping[int, float], published_s: Mapping[int, float], one_gpu_s: float
) -> None:
    """Plot the time by split size: a predicted curve, and the published points.

    The largest size in ``predicted_s`` is the full batch. ``one_gpu_s`` is the published time on
    one GPU, drawn as a horizontal line.
    """
    sizes = sorted(predicted_s)
    fig, axes = figure(width=8, height=3.6)
    predicted: Any = {"color": COLORS["blue"], "label": "two GPUs, predicted"}
    axes.plot(sizes, [predicted_s[size] for size in sizes], "o-", ms=5, **predicted)
    published: Any = {"color": COLORS["vermilion"], "label": "two GPUs, published"}
    points = list(published_s), list(published_s.values())
    axes.plot(*points, "D", ms=8, mfc="none", mew=2, **published)
    axes.axhline(one_gpu_s, color=COLORS["gray"], ls="--", lw=1.5, label="one GPU, published")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.set(
        ylim=(0, 1.08 * max(*predicted_s.values(), *published_s.values())),
        xlabel="split size (images per piece)",
        ylabel="3 batches (s)",
    )
    legend_beside(axes, fontsize=9)
    title(axes, "Both small and large pieces are slow", "virtual time, K80; published: measured")
    best = min(sizes, key=lambda size: predicted_s[size])
    summary = ", ".join(f"{size}: {predicted_s[size]:.2f}" for size in sizes)
    show(
        fig,
        f"Predicted seconds by split size, a curve with its minimum at {best}: {summary}. Published: "
        f"{', '.join(f'{size}: {time_s}' for size, time_s in published_s.items())}; one GPU {one_gpu_s}.",
    )


def parts_of_time(timelines: Mapping[int, Timeline]) -> None:
    """Plot each GPU's computing, copying and idle time in a batch: a panel per GPU, a bar per size."""
    sizes = sorted(timelines)
    devices = timelines[sizes[0]].devices
    fig, panels = figure(1, len(devices), width=9, height=3.4, sharey=True)
    for axes, device in zip(panels, devices, strict=True):
        parts = [_parts(timelines[size], device) for size in sizes]
        heights = {name: [part[name] for part in parts] for name in _PART_COLORS}
        stacked_bars(axes, range(len(sizes)), heights, _PART_COLORS, width=0.8)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlabel("split size (images per piece)")
        axes.set_title(str(device), fontsize=10)
    panels[0].set_ylabel("one batch (s)")
    legend_beside(panels[-1], fontsize=9)
    gpu = timelines[sizes[0]].gpu
    headline(
        fig,
        "Large pieces leave GPUs idle; small ones take longer to compute",
        f"virtual time, {gpu}",
    )
    ends = []
    for size in (sizes[0], sizes[-1]):
        parts = [_parts(timelines[size], device) for device in devices]
        ends.append(
            f"pieces of {size}: computes {_both(parts, 'computes')} s, "
            f"idles {_both(parts, 'idles')} s"
        )
    show(
        fig,
        "Stacked bars by split size for each GPU: seconds in one batch that it computes, copies and "
        f"idles. For the smallest and largest pieces: {'; '.join(ends)}.",
    )


_PART_COLORS = {
    "computes": COLORS["blue"],
    "copies": COLORS["vermilion"],
    "idles": COLORS["gray"],
}


def _parts(timeline: Timeline, device: object) -> dict[str, float]:
    events = timeline.of(str(device))
    busy_s = timeline.busy_s(str(device))
    active_s = covered_s(events)
    return {
        "computes": busy_s,
        "copies": active_s - busy_s,  # copies that overlap with a kernel take no extra time
        "idles": timeline.makespan_s - active_s,
    }


def _both(parts: Sequence[Mapping[str, float]], name: str) -> str:
    return " and ".join(f"{part[name]:.2f}" for part in parts)


def split_times(timelines: Mapping[str, Timeline], message: str) -> None:
    """Plot each timeline's makespan as a bar, and how much of it collectives take."""
    times_ms = {}
    for name, timeline in timelines.items():
        whole_s, sent_s = parts_of(timeline)
        parts_ms = {"everything else": 1e3 * (whole_s - sent_s), "collectives": 1e3 * sent_s}
        times_ms[f"{name}: {sent_s / whole_s:.0%}"] = parts_ms
    gpu = next(iter(timelines.values())).gpu
    how = f"forward and backward of one layer, virtual time, {gpu}; %: time in collectives"
    time_bars(times_ms, "ms", message, how)


def time_bars(
    times: Mapping[str, Mapping[str, float]], xlabel: str, message: str, how: str
) -> None:
    """Plot a stacked bar for each way, with its parts in order, and its total at the end.

    ``times`` maps a way to {part: time, in the unit of ``xlabel``}; parts may be missing.
    """
    fig, axes = figure(width=7.5, height=0.9 + 0.4 * len(times))
    ways = list(times)[::-1]
    parts = list(dict.fromkeys(part for way in times.values() for part in way))
    sizes = {part: [times[way].get(part, 0.0) for way in ways] for part in parts}
    names = ("blue", "sky", "orange", "green", "purple", "gray")
    colors = {part: COLORS[name] for part, name in zip(parts, names, strict=False)}
    ends = stacked_bars(axes, ways, sizes, colors, across=True)
    for place, end in enumerate(ends):
        axes.text(end, place, f" {end:.2f}", va="center")
    axes.set(xlabel=xlabel, xlim=(0, 1.12 * max(ends)))
    legend_beside(axes, fontsize=9)
    title(axes, message, how)
    summary = "; ".join(
        f"{way} {sum(found.values()):.2f}, of which "
        + ", ".join(f"{part} {size:.2f}" for part, size in found.items())
        for way, found in times.items()
    )
    show(fig, f"Stacked bars, {xlabel}: {summary}.")


def parts_of(timeline: Timeline) -> tuple[float, float]:
    """Return a timeline's makespan and the total duration of its collectives, in seconds."""
    sent_s = sum(e.duration_s for e in timeline.events if e.kind == "collective")
    return timeline.makespan_s, sent_s


def gained(times_s: Mapping[int, Mapping[int, float]], message: str, how: str) -> None:
    """Plot the speedup over one GPU by layer width, a line for each number of GPUs.

    ``times_s`` maps a width to {number of GPUs: seconds}, including 1 GPU.
    """
    fig, axes = figure(width=6.5, height=3.4)
    widths = sorted(times_s)
    counts = [count for count in times_s[widths[0]] if count > 1]
    colors = [COLORS[name] for name in ("blue", "green", "vermilion", "purple")]
    for color, marker, count in zip(colors, "osD^", counts, strict=False):
        gains = [times_s[width][1] / times_s[width][count] for width in widths]
        axes.plot(widths, gains, marker=marker, color=color, label=f"{count} GPUs")
        axes.axhline(count, color=color, lw=0.8, ls=":", label=f"{count} times as fast")
    axes.axhline(1, color="black", lw=0.8, label="as fast as one GPU")
    log2_ticks(axes, widths)
    axes.set(xlabel="width of the layer", ylabel="speedup over one GPU", ylim=(0, None))
    legend_beside(axes, fontsize=10)
    title(axes, message, how)
    summary = "; ".join(
        f"{count} GPUs: "
        + ", ".join(f"{times_s[w][1] / times_s[w][count]:.2f} at width {w}" for w in widths)
        for count in counts
    )
    show(fig, f"Line chart of the speedup over one GPU, by width. {summary}.")


def speedups(times_s: Mapping[str, Mapping[int, float]], gpu: str) -> None:
    """Plot the speedup over one GPU by number of GPUs, a line per network; dotted: linear scaling.

    ``times_s`` maps a network to {number of GPUs: seconds per step}, including 1 GPU.
    """
    fig, axes = figure(width=7.5, height=3.2)
    counts = list(next(iter(times_s.values())))
    axes.plot(counts, counts, color=COLORS["gray"], ls=":", lw=1.5, label="linear scaling")
    texts = []
    for (name, times), color, marker in zip(times_s.items(), SERIES, "os^D", strict=False):
        gains = [times[1] / times[count] for count in counts]
        axes.plot(counts, gains, marker=marker, color=color, label=name)
        end = counts[-1], gains[-1]
        text_near(axes, f"{gains[-1]:.1f} times", end, (8, 0), va="center", color=color)
        texts.append(
            f"{name}: {', '.join(f'{g:.1f} on {n}' for n, g in zip(counts, gains, strict=True))}"
        )
    axes.set_xticks(counts)
    axes.set(xlabel="GPUs", ylabel="speedup over one GPU", ylim=(0, None))
    axes.legend(loc="upper left", fontsize=9)
    title(
        axes, "More GPUs only help a step that's worth splitting", f"virtual time, {gpu}, one step"
    )
    show(fig, f"Line chart of the speedup over one GPU, by number of GPUs. {'; '.join(texts)}.")


def tokens_that_hide(enough: Mapping[str, float], per_token_s: float) -> None:
    """Plot a layer's arithmetic and communication by tokens per GPU, with a ring where they cross.

    ``enough`` maps each of four links to the tokens at which both take the same time;
    ``per_token_s`` is the arithmetic's time for each token. A dotted line marks one sequence of
    8192.
    """
    fig, axes = figure(width=8, height=3.8)
    low, high = min(enough.values()) / 3, max(enough.values()) * 3
    ends = [low, high]
    computing = [1e3 * per_token_s * tokens for tokens in ends]
    axes.plot(ends, computing, color=COLORS["blue"], label="computing")
    colors = [COLORS[name] for name in ("orange", "green", "purple", "vermilion")]
    for (name, tokens), color in zip(enough.items(), colors, strict=True):
        time_ms = 1e3 * per_token_s * tokens
        # The lowest one's label is below the line, away from the others'.
        lowest = tokens == min(enough.values())
        axes.plot(ends, [time_ms] * 2, color=color, label=name)
        axes.plot([tokens], [time_ms], "o", ms=9, mfc="white", mec=color, mew=2)
        offset, side = ((8, -13), "left") if lowest else ((-8, 5), "right")
        text = f"{_two_digits(tokens):,} tokens"
        text_near(axes, text, (tokens, time_ms), offset, ha=side, fontsize=9)
    axes.axvline(8192, color=COLORS["gray"], ls=":", lw=1.5, label="one sequence")
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="tokens per GPU")
    ticks = [1000 * 4**k for k in range(9) if low <= 1000 * 4**k <= high]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    times_ms = [10**k for k in range(-3, 5) if computing[0] <= 10**k <= computing[1]]
    axes.set_yticks(times_ms, [f"{time_ms:,g}" for time_ms in times_ms])
    axes.minorticks_off()
    axes.set_ylabel("one layer's backward (ms)")
    legend_beside(axes, fontsize=9)
    title(axes, "To the right of its ring, a link's communication is hidden", "estimated on paper")
    summary = ", ".join(f"{name} {_two_digits(tokens):,}" for name, tokens in enough.items())
    show(
        fig,
        "Line chart of a layer's time by tokens per GPU, on logarithmic axes. Computing time "
        f"rises, communication time doesn't; they cross at these tokens per GPU: {summary}.",
    )


def _two_digits(number: float) -> int:
    """Round to two significant digits: an estimate on paper doesn't have more."""
    return int(float(f"{number:.1e}"))


def same_batch(speeds: Mapping[str, Mapping[int, float]], tokens: Mapping[int, int]) -> None:
    """Plot million tokens/s by number of GPUs, a line per network; dotted: linear scaling.

    ``tokens`` maps a number of GPUs to the tokens per GPU and step.
    """
    fig, axes = figure(width=7.5, height=3.6)
    counts = list(tokens)
    first = next(iter(speeds.values()))[counts[0]]
    axes.plot(counts, [first * n / counts[0] for n in counts], color=COLORS["gray"], ls=":", lw=1)
    for (name, speed), color in zip(speeds.items(), SERIES, strict=False):
        axes.plot(counts, [speed[n] for n in counts], "o-", color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs, and tokens per GPU and step")
    axes.set_xticks(counts, [f"{n}\n{tokens[n]:,}" for n in counts])
    lowest = min(speed[counts[0]] for speed in speeds.values())
    ticks = [2**k for k in range(20) if lowest / 2 < 2**k <= first * counts[-1] / counts[0]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("million tokens/s, all GPUs")
    axes.legend(loc="upper left", fontsize=9)
    title(axes, "More GPUs, the same batch", "virtual time; dotted: linear scaling")
    summary = "; ".join(
        f"{name}: {speed[counts[0]]:.2f} on {counts[0]} GPUs, {speed[counts[-1]]:.2f} on {counts[-1]}"
        for name, speed in speeds.items()
    )
    show(
        fig,
        f"Line chart of million tokens per second by number of GPUs, on logarithmic axes. {summary}.",
    )


def goodput(
    shares: Mapping[int, Mapping[float, tuple[float, float]]], best_s: Mapping[int, float]
) -> None:
    """Plot goodput by checkpoint interval, a line for each number of GPUs.

    ``shares`` maps a number of GPUs to {interval in seconds: (by formula, simulated)}, and
    ``best_s`` maps it to the best interval by the square-root rule.
    """
    fig, axes = figure(width=7.5, height=3.4)
    for (gpus, points), color in zip(shares.items(), SERIES, strict=False):
        minutes = [interval_s / 60 for interval_s in points]
        axes.plot(minutes, [f for f, _ in points.values()], color=color, label=f"{gpus:,} GPUs")
        axes.plot(minutes, [s for _, s in points.values()], "o", color=color, ms=4)
        axes.axvline(best_s[gpus] / 60, color=color, ls="--", lw=1)
    axes.set(xscale="log", xlabel="minutes of training between checkpoints", ylim=(0, 1))
    axes.set_xticks(minutes, [f"{m:g}" for m in minutes])
    axes.minorticks_off()
    axes.set_ylabel("fraction of useful time")
    axes.legend(loc="lower center", fontsize=9)
    title(
        axes,
        "Saving too often costs time; saving too rarely means repeating work",
        "lines: Daly's formula; points: simulated failures; dashed: square-root rule",
    )
    summary = "; ".join(
        f"with {gpus:,} GPUs, it is highest near {format_seconds(best_s[gpus])}, at "
        f"{max(f for f, _ in points.values()):.0%}, and {points[max(points)][0]:.0%} at the longest interval"
        for gpus, points in shares.items()
    )
    show(fig, f"Line chart of the fraction of useful time by checkpoint interval: {summary}.")
