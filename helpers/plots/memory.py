"""Figures for memory: bytes by cause over a step, at its peak, per GPU; peaks by k or segments."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.patches import Rectangle

from helpers.plots.style import (
    COLORS,
    figure,
    legend_beside,
    log2_ticks,
    show,
    stacked_bars,
    text_near,
    title,
)
from vgpu.profiling.memory import ACTIVATIONS, OTHER, TEMPORARY, StepRecord

MIB, _GIB = 2**20, 2**30
_UNITS = {"GB": 1e9, "GiB": _GIB, "MiB": MIB}
# A cause has the same color in all figures, and bars stack in this order.
CAUSE_COLORS = {
    "parameters": COLORS["blue"],
    "optimizer state": COLORS["purple"],
    "inputs": COLORS["yellow"],
    "gradients": COLORS["vermilion"],
    "replicas": COLORS["sky"],
    "gathered": COLORS["sky"],
    "KV cache": COLORS["green"],
    "gathered parameters": COLORS["sky"],
    "gradients, gathered parameters, activations": COLORS["sky"],
    ACTIVATIONS: COLORS["orange"],
    "outputs": COLORS["orange"],
    TEMPORARY: COLORS["gray"],
    OTHER: COLORS["gray"],
}
# The causes that a StepRecord has.
_STEP_CAUSES = ("parameters", "optimizer state", "inputs", "gradients", ACTIVATIONS, TEMPORARY)
_OF_MODULE = [COLORS[name] for name in ("sky", "blue", "green", "yellow", "orange", "purple")]


def step_by_cause(record: StepRecord) -> None:
    """Plot MiB by cause over the operations of one step as a stacked area, with phases and peak."""
    fig, axes = figure(width=8, height=3.6)
    _step_areas(axes, record)
    peak = record.peak
    place, top = record.moments.index(peak), peak.total_bytes / MIB
    axes.plot([place], [top], "v", color="black")
    text_near(axes, f"peak {top:.1f} MiB: {peak.operation}", (place, top), (6, 6))
    axes.set(ylim=(0, top * 1.25), xlabel="operations of one training step, in order")
    title(axes, f"The peak is in {peak.phase}", "bytes counted after each operation")
    first, last = record.moments[0].total_bytes / MIB, record.moments[-1].total_bytes / MIB
    held = ", ".join(f"{cause} {size / MIB:.1f}" for cause, size in peak.by_cause.items() if size)
    show(
        fig,
        f"Area chart of MiB by cause over a step's {len(record.moments)} operations, from {first:.1f} "
        f"to {last:.1f} MiB. Peak: {top:.1f} MiB in {peak.phase}, at {peak.operation}: {held} MiB.",
    )


def step_by_module(record: StepRecord) -> None:
    """Plot activations in MiB by module over the operations of one step, as a stacked area."""
    fig, axes = figure(width=8, height=3)
    names = sorted({name for m in record.moments for name in m.activations_by_module})
    sizes = {
        name or "outside (the loss)": [
            m.activations_by_module.get(name, 0) / MIB for m in record.moments
        ]
        for name in names
    }
    _areas(axes, sizes, [_OF_MODULE[index % len(_OF_MODULE)] for index in range(len(names))])
    _phases(axes, record)
    axes.set(
        ylim=(0, record.most(ACTIVATIONS) / MIB * 1.2),
        xlabel="operations of one training step, in order",
    )
    title(axes, "Last created, first freed", "activations by module, bytes counted")
    lives = [
        f"{name or 'the loss'} {max(sizes[name or 'outside (the loss)']):.1f}" for name in names
    ]
    show(
        fig,
        "Area chart of activations by module over the operations of a step. The last ones created "
        f"are the first freed. Maximum by module, in MiB: {', '.join(lives)}.",
    )


def peaks_by_cause(records: Mapping[str, StepRecord]) -> None:
    """Plot what each record's peak consists of, as a stacked bar of MiB by cause."""
    held = {f"{name}\nin {r.peak.phase}": r.peak.by_cause for name, r in records.items()}
    how = "bytes counted, at the peak of one step"
    held_by_cause(held, message="What makes up the peak", how=how, unit="MiB")


def against_k(peaks: Mapping[int, int], times_s: Mapping[int, float], gpu: str) -> None:
    """Plot a step's peak and relative time (shortest: 1) by k, the number of micro-batches."""
    fig, (left, right) = figure(1, 2, width=8, height=3)
    left.plot(list(peaks), [size / MIB for size in peaks.values()], "o-", color=COLORS["blue"])
    left.set(ylabel="peak of one step, MiB", ylim=(0, None))
    title(left, "Less memory", "bytes counted")
    shortest_s = min(times_s.values())
    ratios = [time_s / shortest_s for time_s in times_s.values()]
    right.plot(list(times_s), ratios, "o-", color=COLORS["orange"])
    right.set(ylabel="time, relative to the shortest", ylim=(0, None))
    title(right, "Eventually, more time", f"virtual time, {gpu}")
    for axes in (left, right):
        log2_ticks(axes, list(peaks))
        axes.set_xlabel("k, micro-batches per step")
    summary = ", ".join(
        f"k = {k}: {peaks[k] / MIB:.0f} MiB and {times_s[k] / shortest_s:.2f} times the shortest"
        for k in peaks
    )
    show(fig, f"Two line charts by k: peak memory, and time relative to the shortest. {summary}.")


def against_segments(
    counted: Mapping[str, Mapping[int, float]],
    predicted: Mapping[str, Mapping[int, float]] | None = None,
    message: str = "The minimum is at the square root of the depth",
) -> None:
    """Plot the peaks of multiple networks by number of segments.

    ``counted`` maps a network to {segments: peak in layer outputs}; ``predicted`` has a formula's
    values, drawn dashed. Without them, the peak axis is logarithmic, because networks whose layers
    save more are far above the others.
    """
    fig, axes = figure(width=8, height=3.8)
    colors = [COLORS[name] for name in ("orange", "green", "blue")]
    for (name, curve), color in zip(counted.items(), colors, strict=False):
        best = min(curve, key=lambda segments: curve[segments])
        style = "o" if predicted else "o-"
        label = f"{name}: best {best}"
        axes.plot(list(curve), list(curve.values()), style, color=color, label=label)
        if predicted:
            line = predicted[name]
            axes.plot(list(line), list(line.values()), "--", color=color, linewidth=1)
        axes.plot([best], [curve[best]], "o", ms=13, mfc="none", color=color)
    axes.set_xscale("log", base=2)
    ticks = sorted({segments for curve in counted.values() for segments in curve})
    labels = {tick: label for tick, label in zip(ticks, _apart(ticks), strict=True) if label}
    axes.set_xticks(list(labels), list(labels.values()), fontsize=8)
    if predicted:
        axes.set_ylim(0)
    else:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="segments", ylabel="peak, in layer outputs")
    axes.legend(fontsize=9)
    formula = "; dashed: the formula" if predicted else ""
    title(axes, message, f"dots: bytes counted{formula}; rings: fewest bytes")
    show(
        fig,
        "Line chart of the peak, in layer outputs, by number of segments. Minimum: "
        + ", ".join(
            f"{name} {min(curve.values()):.0f} at {min(curve, key=lambda s: curve[s])} segments"
            for name, curve in counted.items()
        )
        + ".",
    )


def steps_by_cause(records: Mapping[str, StepRecord]) -> None:
    """Plot MiB by cause over each record's step, a panel per record, all on one scale."""
    rows = len(records)
    fig, grid = figure(rows, width=8, height=0.4 + 2.1 * rows, sharey=True, squeeze=False)
    panels = list(grid.flat)
    top = max(record.peak.total_bytes for record in records.values()) / MIB
    for axes, (name, record) in zip(panels, records.items(), strict=True):
        _step_areas(axes, record)
        peak = record.peak.total_bytes / MIB
        axes.plot([record.moments.index(record.peak)], [peak], "v", color="black", markersize=4)
        title(axes, name, f"peak {peak:.2f} MiB in {record.peak.phase}, bytes counted")
    for axes in panels[1:]:
        axes.get_legend().remove()
    panels[0].set_ylim(0, top * 1.2)
    panels[-1].set_xlabel("operations of one training step, in order")
    summary = [
        f"{name} {record.peak.total_bytes / MIB:.2f} MiB in {record.peak.phase}"
        for name, record in records.items()
    ]
    show(
        fig,
        "Area charts of MiB by cause over the operations of a step, on one scale. Peaks: "
        f"{', '.join(summary)}.",
    )


def fitting(peaks: Mapping[str, int], capacity_bytes: int) -> None:
    """Plot a bar for each way to run a step, and the capacity that it must not exceed."""
    fig, axes = figure(width=8, height=2.6)
    names, sizes = list(peaks)[::-1], [size / MIB for size in peaks.values()][::-1]
    limit = capacity_bytes / MIB
    colors = [COLORS["vermilion" if size > limit else "blue"] for size in sizes]
    bars: Any = axes.barh(names, sizes, 0.6, color=colors)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.axvline(limit, color="black", linestyle="--", linewidth=1)
    among = axes.get_xaxis_transform()
    axes.text(limit, 0.45, f" capacity {limit:.0f} MiB", transform=among, fontsize=9)
    axes.set(xlim=(0, max(*sizes, limit) * 1.1), xlabel="MiB on the GPU at the peak of a step")
    axes.grid(axis="y", visible=False)
    title(axes, "Three ways to fit", "bytes counted; dashed: the GPU's capacity")
    summary = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in peaks.items())
    show(fig, f"Bar chart of a step's peak; the capacity is {limit:.0f} MiB: {summary}.")


def _step_areas(axes: Any, record: StepRecord) -> None:
    """Draw MiB by cause over a step's operations, and its phases."""
    sizes = {cause: [m.by_cause[cause] / MIB for m in record.moments] for cause in _STEP_CAUSES}
    _areas(axes, sizes, [CAUSE_COLORS[cause] for cause in _STEP_CAUSES])
    _phases(axes, record)


def _areas(axes: Any, sizes: Mapping[str, Sequence[float]], colors: Sequence[str]) -> None:
    places = range(len(next(iter(sizes.values()))))
    axes.stackplot(places, *sizes.values(), colors=colors, labels=list(sizes), step="post")
    axes.set_ylabel("MiB")
    axes.margins(x=0)
    axes.grid(axis="x", visible=False)
    legend_beside(axes, reverse=True)


def _phases(axes: Any, record: StepRecord) -> None:
    """Draw a thin line where each phase starts, and its name at the top, if there's room."""
    phases = [moment.phase for moment in record.moments]
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(phases)) if a != b), len(phases)]
    for start, end in pairwise(starts):
        axes.axvline(start, color="black", linewidth=0.6, linestyle=":")
        room = (end - start) / len(phases)
        if room < 0.03:
            continue
        narrow = room < 0.11
        axes.text(
            (start + end) / 2,
            0.98,
            phases[start],
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
            rotation="vertical" if narrow else "horizontal",
        )


def _apart(ticks: Sequence[int]) -> list[str]:
    """Return a logarithmic axis's tick labels, minus those that would touch the previous one."""
    texts, last = [], 0
    for tick in ticks:
        texts.append(str(tick) if tick >= 1.15 * last else "")
        last = tick if texts[-1] else last
    return texts


def held_by_cause(
    held: Mapping[str, Mapping[str, float]],
    capacity_bytes: float | None = None,
    message: str = "What each GPU holds",
    how: str = "bytes counted, shapes only",
    unit: str = "GB",
    marks: Mapping[str, float] | None = None,
) -> None:
    """Plot the bytes on one GPU by cause: a stacked bar per entry, the capacity as a dashed line.

    ``unit`` is GB, GiB or MiB. ``marks`` maps one or two labels to their bytes, in ascending order;
    each is drawn as a marker above the bars.
    """
    fig, axes = figure(width=8, height=1.1 + 0.45 * len(held) + (0.4 if marks else 0))
    names = list(held)[::-1]
    sizes = {
        cause: [held[name].get(cause, 0) / _UNITS[unit] for name in names]
        for cause in CAUSE_COLORS
        if any(causes.get(cause) for causes in held.values())
    }
    ends = stacked_bars(axes, range(len(names)), sizes, CAUSE_COLORS, across=True)
    widest = max(ends)
    room = ""
    if capacity_bytes is not None:
        capacity = capacity_bytes / _UNITS[unit]
        axes.axvline(capacity, color="black", linestyle="--", linewidth=1)
        widest = max(widest, capacity)
        room = f" The capacity is {capacity:.0f} {unit}."
    plate = {"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0}
    look: Any = {"fontsize": 9, "bbox": plate}
    for place, total in enumerate(ends):
        # A label that would lie across the dashed line is moved to the right of it.
        across = capacity_bytes is not None and total < capacity < total + 0.2 * widest
        end = capacity if across else total, place
        text_near(axes, f"{total:.1f} {unit}", end, (4, 0), va="center", **look)
    marked = {label: size / _UNITS[unit] for label, size in (marks or {}).items()}
    for (label, spot), side in zip(marked.items(), ("right", "left"), strict=False):
        axes.plot([spot], [len(names) - 0.55], "v", color="black", ms=6, clip_on=False)
        axes.text(
            spot + (widest / 150 if side == "left" else -widest / 150), len(names) - 0.33,
            f"{label}: {spot:.1f} {unit}", ha=side, **look,
        )  # fmt: skip
    if marked:
        axes.set_ylim(-0.5, len(names))
        room += (
            f" Marked: {', '.join(f'{label} {spot:.1f} {unit}' for label, spot in marked.items())}."
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, widest * 1.3), xlabel=f"{unit} on each GPU")
    legend_beside(axes)
    title(axes, message, how)
    summary = "; ".join(
        f"{name} {total:.1f} {unit}" for name, total in zip(names, ends, strict=True)
    )
    show(fig, f"Stacked bars of the bytes on each GPU, by cause. {summary}.{room}")


def who_holds(cut: Mapping[str, Sequence[str]], gpus: int) -> None:
    """Draw what every GPU holds of each kind of bytes: a panel per strategy, a column per GPU.

    ``cut`` maps each strategy to what it shards; everything else is replicated on every GPU.
    """
    causes = ["parameters", "gradients", "optimizer state"]
    fig, grid = figure(1, len(cut), width=8.5, height=2.5, sharey=True)
    for axes, (name, parts) in zip(grid, cut.items(), strict=True):
        for row, cause in enumerate(causes):
            for gpu in range(gpus):
                whole = cause not in parts
                axes.add_patch(Rectangle((gpu, row), 0.8, 0.8, fill=False, edgecolor="#BBBBBB"))
                low, height = (row, 0.8) if whole else (row + 0.8 * gpu / gpus, 0.8 / gpus)
                axes.add_patch(Rectangle((gpu, low), 0.8, height, color=CAUSE_COLORS[cause]))
        axes.set(xlim=(-0.2, gpus), ylim=(len(causes), -0.2))
        axes.set_xticks([gpu + 0.4 for gpu in range(gpus)], [str(gpu) for gpu in range(gpus)])
        axes.set_yticks([row + 0.4 for row in range(len(causes))], causes)
        axes.set_xlabel("GPU")
        axes.grid(visible=False)
        axes.set_title(name, fontweight="bold")
    summary = "; ".join(
        f"{name}: {' and '.join(parts) if parts else 'nothing'} sharded"
        for name, parts in cut.items()
    )
    show(
        fig, f"Grids of what each of {gpus} GPUs holds. {summary}; the rest is replicated on each."
    )


def memory_over_step(sizes: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """Plot the bytes on one GPU after each allocation and free in a step, one curve per run.

    ``sizes`` maps runs to phases, and phases to bytes. A phase has the same width in every run.
    """
    fig, axes = figure(width=8.5, height=3.6)
    colors = [COLORS[name] for name in ("black", "vermilion", "blue", "green", "purple")]
    peaks = {name: max(max(phase) for phase in phases.values()) for name, phases in sizes.items()}
    for (name, phases), color in zip(sizes.items(), colors, strict=False):
        places, curve = [], []
        for start, phase in enumerate(phases.values()):
            places += [start + index / len(phase) for index in range(len(phase))] + [start + 1]
            curve += [size / _GIB for size in [*phase, phase[-1]]]
        label = f"{name}: peak {peaks[name] / _GIB:.1f} GiB"
        axes.plot(places, curve, color=color, label=label, linewidth=1.2)
    names = list(next(iter(sizes.values())))
    for start in range(1, len(names)):
        axes.axvline(start, color="black", linewidth=0.6, linestyle=":")
    axes.set(xlim=(0, len(names)), ylim=(0, None))
    axes.set_xticks([start + 0.5 for start in range(len(names))], names)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("GiB on one GPU")
    legend_beside(axes)
    title(
        axes,
        "Wrap each part: only one or two are gathered at a time",
        "bytes counted at each allocation",
    )
    summary = ", ".join(f"{name} {peak / _GIB:.1f}" for name, peak in peaks.items())
    show(
        fig,
        f"Line chart of the bytes on one GPU in {', '.join(names)}. Peaks in GiB: {summary}.",
    )
