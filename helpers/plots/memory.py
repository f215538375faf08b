"""The bytes of a training step: over its operations, at its peak, against k and segments."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from helpers.plots.style import COLOURS, figure, headline, show, title
from vgpu.profiling.memory import ACTIVATIONS, TEMPORARY, StepRecord

_MIB = 2**20
_OF_CAUSE = {
    "parameters": COLOURS["blue"],
    "optimizer state": COLOURS["purple"],
    "inputs": COLOURS["black"],
    "gradients": COLOURS["vermilion"],
    ACTIVATIONS: COLOURS["orange"],
    TEMPORARY: COLOURS["grey"],
}
_OF_MODULE = [COLOURS[name] for name in ("sky", "blue", "green", "yellow", "orange", "purple")]


def step_by_cause(record: StepRecord) -> None:
    """An area over the operations of one step: MiB by cause, the phases, and the peak named."""
    made, axes = figure(width=8, height=3.6)
    sizes = {cause: [m.by_cause[cause] / _MIB for m in record.moments] for cause in _OF_CAUSE}
    _areas(axes, sizes, list(_OF_CAUSE.values()))
    _phases(axes, record)
    peak = record.peak
    place, top = record.moments.index(peak), peak.total_bytes / _MIB
    axes.plot([place], [top], "v", color="black")
    axes.annotate(
        f"peak {top:.1f} MiB: {peak.operation}", (place, top), (6, 6), textcoords="offset points"
    )
    axes.set_ylim(0, top * 1.25)
    axes.set_xlabel("operations of one training step, in order")
    title(axes, f"The peak is in {peak.phase}", "bytes counted after each operation")
    first, last = record.moments[0].total_bytes / _MIB, record.moments[-1].total_bytes / _MIB
    held = ", ".join(f"{cause} {size / _MIB:.1f}" for cause, size in peak.by_cause.items() if size)
    show(
        made,
        f"Area of MiB by cause over the {len(record.moments)} operations of a step, from {first:.1f} "
        f"to {last:.1f} MiB. Peak {top:.1f} MiB in {peak.phase}, at {peak.operation}: {held} MiB.",
    )


def step_by_module(record: StepRecord) -> None:
    """An area over the operations of one step: activations, MiB by the module that made them."""
    made, axes = figure(width=8, height=3)
    names = sorted({name for m in record.moments for name in m.activations_by_module})
    sizes = {
        name or "outside (the loss)": [
            m.activations_by_module.get(name, 0) / _MIB for m in record.moments
        ]
        for name in names
    }
    _areas(axes, sizes, [_OF_MODULE[index % len(_OF_MODULE)] for index in range(len(names))])
    _phases(axes, record)
    axes.set_ylim(0, record.most(ACTIVATIONS) / _MIB * 1.2)
    axes.set_xlabel("operations of one training step, in order")
    title(axes, "Last made, first freed", "activations by module, bytes counted")
    lives = [
        f"{name or 'the loss'} {max(sizes[name or 'outside (the loss)']):.1f}" for name in names
    ]
    show(
        made,
        "Area of the activations over the operations of a step, by module. What is made last is "
        f"freed first. At most, in MiB: module {', '.join(lives)}.",
    )


def peaks_by_cause(records: Mapping[str, StepRecord]) -> None:
    """A bar for each record: what its peak consists of, MiB by cause."""
    made, axes = figure(width=8, height=0.9 + 0.5 * len(records))
    peaks = [record.peak for record in records.values()][::-1]
    left = [0.0] * len(peaks)
    for cause, colour in _OF_CAUSE.items():
        sizes = [peak.by_cause[cause] / _MIB for peak in peaks]
        axes.barh(range(len(peaks)), sizes, 0.6, left, color=colour, label=cause)
        left = [low + size for low, size in zip(left, sizes, strict=True)]
    for place, (peak, end) in enumerate(zip(peaks, left, strict=True)):
        axes.text(end, place, f" {end:.1f}, in {peak.phase}", va="center", fontsize=8)
    axes.set_yticks(range(len(peaks)), list(records)[::-1])
    axes.set_xlim(0, max(left) * 1.28)
    axes.set_xlabel("MiB at the peak of one step")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    headline(made, "What the peak consists of", "bytes counted")
    told = [
        f"{name} {peak.total_bytes / _MIB:.1f} MiB in {peak.phase}"
        for name, peak in zip(list(records)[::-1], peaks, strict=True)
    ]
    show(made, f"Bars of what each step's peak consists of: {'; '.join(told[::-1])}.")


def against_k(peaks: Mapping[int, int], times_s: Mapping[int, float], gpu: str) -> None:
    """Two panels against the number k of small batches: peak bytes, and time beside the shortest."""
    made, (left, right) = figure(1, 2, width=8, height=3)
    left.plot(list(peaks), [size / _MIB for size in peaks.values()], "o-", color=COLOURS["blue"])
    left.set_ylabel("peak of one step, MiB")
    left.set_ylim(0)
    title(left, "Less memory", "bytes counted")
    shortest_s = min(times_s.values())
    ratios = [time_s / shortest_s for time_s in times_s.values()]
    right.plot(list(times_s), ratios, "o-", color=COLOURS["orange"])
    right.set_ylabel("time, the shortest is 1")
    right.set_ylim(0)
    title(right, "In the end, more time", f"virtual time, {gpu}")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(peaks), [str(k) for k in peaks])
        axes.minorticks_off()
        axes.set_xlabel("k, small batches for one step")
    told = ", ".join(
        f"k = {k} {peaks[k] / _MIB:.0f} MiB and {times_s[k] / shortest_s:.2f} times" for k in peaks
    )
    show(made, f"Two curves against k, peak memory and time beside the shortest: {told}.")


def against_segments(
    counted: Mapping[str, Mapping[int, float]],
    predicted: Mapping[str, Mapping[int, float]] | None = None,
    message: str = "The valley lies at the square root of the depth",
) -> None:
    """Peaks against segments of several networks: {name: {segments: layer outputs at once}}.

    predicted: the same by a formula, dashed. Without it, the axis of the peaks is logarithmic,
    since networks whose layers save more lie far above the others.
    """
    made, axes = figure(width=8, height=3.8)
    colours = [COLOURS[name] for name in ("orange", "green", "blue")]
    for (name, curve), colour in zip(counted.items(), colours, strict=False):
        best = min(curve, key=lambda segments: curve[segments])
        style = "o" if predicted else "o-"
        label = f"{name}: best {best}"
        axes.plot(list(curve), list(curve.values()), style, color=colour, label=label)
        if predicted:
            line = predicted[name]
            axes.plot(list(line), list(line.values()), "--", color=colour, linewidth=1)
        axes.plot([best], [curve[best]], "o", ms=13, mfc="none", color=colour)
    axes.set_xscale("log", base=2)
    ticks = sorted({segments for curve in counted.values() for segments in curve})
    axes.set_xticks(ticks, _apart(ticks), fontsize=8)
    if predicted:
        axes.set_ylim(0)
    else:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("segments")
    axes.set_ylabel("peak, in layer outputs")
    axes.legend(fontsize=9)
    formula = "; dashed: the formula" if predicted else ""
    title(axes, message, f"dots: bytes counted{formula}; rings: the fewest bytes")
    show(
        made,
        "Curves of the peak, in layer outputs, against the number of segments. Lowest: "
        + ", ".join(
            f"{name} at {min(curve, key=lambda s: curve[s])} segments with {min(curve.values()):.0f}"
            for name, curve in counted.items()
        )
        + ".",
    )


def steps_by_cause(records: Mapping[str, StepRecord], columns: int = 1) -> None:
    """A panel for each record, on one scale: MiB by cause over the operations of its step."""
    rows = -(-len(records) // columns)
    made, grid = figure(rows, columns, width=8, height=0.4 + 2.1 * rows, sharey=True, squeeze=False)
    panels = list(grid.flat)
    top = max(record.peak.total_bytes for record in records.values()) / _MIB
    for axes, (name, record) in zip(panels, records.items(), strict=False):
        sizes = {cause: [m.by_cause[cause] / _MIB for m in record.moments] for cause in _OF_CAUSE}
        _areas(axes, sizes, list(_OF_CAUSE.values()))
        _phases(axes, record)
        peak = record.peak.total_bytes / _MIB
        axes.plot([record.moments.index(record.peak)], [peak], "v", color="black", markersize=4)
        title(axes, name, f"peak {peak:.2f} MiB in {record.peak.phase}, bytes counted")
    legends = [axes.get_legend() for axes in panels[: len(records)]]
    for index, legend in enumerate(legends):
        if index != columns - 1:
            legend.remove()
    panels[0].set_ylim(0, top * 1.2)
    for axes in grid[:, 1:].flat:
        axes.set_ylabel("")
    for axes in grid[-1]:
        axes.set_xlabel("operations of one training step, in order")
    told = [
        f"{name} {record.peak.total_bytes / _MIB:.2f} MiB in {record.peak.phase}"
        for name, record in records.items()
    ]
    show(
        made,
        "Panels of MiB by cause over the operations of a step, on one scale. Peaks: "
        f"{', '.join(told)}.",
    )


def fitting(peaks: Mapping[str, int], capacity_bytes: int) -> None:
    """A bar for each way to run a step, and the line that it must stay under."""
    made, axes = figure(width=8, height=2.6)
    names, sizes = list(peaks)[::-1], [size / _MIB for size in peaks.values()][::-1]
    limit = capacity_bytes / _MIB
    colours = [COLOURS["vermilion" if size > limit else "blue"] for size in sizes]
    bars: Any = axes.barh(names, sizes, 0.6, color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.axvline(limit, color="black", linestyle="--", linewidth=1)
    among = axes.get_xaxis_transform()
    axes.text(limit, 0.45, f" capacity {limit:.0f} MiB", transform=among, fontsize=9)
    axes.set_xlim(0, max(*sizes, limit) * 1.1)
    axes.set_xlabel("MiB on the GPU at the peak of a step")
    axes.grid(axis="y", visible=False)
    title(axes, "Three ways under the line", "bytes counted; the line is the GPU's capacity")
    told = ", ".join(f"{name} {size / _MIB:.0f} MiB" for name, size in peaks.items())
    show(made, f"Bars of a step's peak, beside a capacity of {limit:.0f} MiB: {told}.")


def _areas(axes: Any, sizes: Mapping[str, Sequence[float]], colours: Sequence[str]) -> None:
    places = range(len(next(iter(sizes.values()))))
    axes.stackplot(places, *sizes.values(), colors=colours, labels=list(sizes), step="post")
    axes.set_ylabel("MiB")
    axes.margins(x=0)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, reverse=True)


def _phases(axes: Any, record: StepRecord) -> None:
    """A thin line where a phase begins, and its name above."""
    phases = [moment.phase for moment in record.moments]
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(phases)) if a != b), len(phases)]
    for start, end in pairwise(starts):
        axes.axvline(start, color="black", linewidth=0.6, linestyle=":")
        narrow = end - start < 0.11 * len(phases)
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
    """The numbers of a logarithmic axis, but for those that would touch the one before."""
    texts, last = [], 0
    for tick in ticks:
        texts.append(str(tick) if tick >= 1.15 * last else "")
        last = tick if texts[-1] else last
    return texts
