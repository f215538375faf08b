"""The bytes of a training step: over its operations, at its peak, against k and segments."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt

from helpers.memory import ACTIVATIONS, TEMPORARY, StepRecord
from helpers.plots.style import COLOURS, figure, headline, title

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
    plt.show()
    plt.close(made)


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
    plt.show()
    plt.close(made)


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
    plt.show()
    plt.close(made)


def against_k(peaks: Mapping[int, int], ratios: Mapping[int, Sequence[float]]) -> None:
    """Two panels against the number k of small batches: peak bytes, and time beside k = 1."""
    made, (left, right) = figure(1, 2, width=8, height=3)
    left.plot(list(peaks), [size / _MIB for size in peaks.values()], "o-", color=COLOURS["blue"])
    left.set_ylabel("peak of one step, MiB")
    left.set_ylim(0)
    title(left, "Less memory", "counted")
    _spread(right, ratios)
    right.set_ylabel("time, k = 1 is 1")
    right.set_ylim(0)
    title(right, "More overhead", "measured: median, lowest and highest")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(peaks), [str(k) for k in peaks])
        axes.set_xlabel("k, small batches for one step")
    plt.show()
    plt.close(made)


def against_segments(
    counted: Mapping[int, Mapping[int, float]], predicted: Mapping[int, Mapping[int, float]]
) -> None:
    """Peaks against segments for several depths: {depth: {segments: layer outputs at once}}."""
    made, axes = figure(width=8, height=3.8)
    colours = [COLOURS[name] for name in ("orange", "green", "blue")]
    for (depth, curve), colour in zip(counted.items(), colours, strict=False):
        best = min(curve, key=lambda segments: curve[segments])
        axes.plot(
            list(curve),
            list(curve.values()),
            "o",
            color=colour,
            label=f"{depth} layers: best {best}",
        )
        line = predicted[depth]
        axes.plot(list(line), list(line.values()), "--", color=colour, linewidth=1)
        axes.plot([best], [curve[best]], "o", ms=13, mfc="none", color=colour)
    axes.set_xscale("log", base=2)
    ticks = sorted({segments for curve in counted.values() for segments in curve})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("segments")
    axes.set_ylabel("peak, in layer outputs")
    axes.set_ylim(0)
    axes.legend()
    title(
        axes,
        "The valley lies at the square root of the depth",
        "dots: bytes counted; dashed: the formula; rings: the fewest bytes",
    )
    plt.show()
    plt.close(made)


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
    plt.show()
    plt.close(made)


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
    plt.show()
    plt.close(made)


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


def _spread(axes: Any, ratios: Mapping[int, Sequence[float]]) -> None:
    for k, values in ratios.items():
        ordered = sorted(values)
        axes.plot([k, k], [ordered[0], ordered[-1]], color=COLOURS["orange"], linewidth=2)
        axes.plot([k], [ordered[len(ordered) // 2]], "o", color=COLOURS["orange"])
