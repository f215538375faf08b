"""Where tensors are when a layer is split over GPUs, and what the split costs in virtual time."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from helpers.plots.collectives import RANK_COLOURS
from helpers.plots.style import COLOURS, figure, show, title
from vgpu import Timeline

WHOLE, ROWS, COLUMNS, PARTIAL = "whole", "rows", "columns", "partial"
_SAID = {
    WHOLE: "all of it",
    ROWS: "its rows",
    COLUMNS: "its columns",
    PARTIAL: "a sum's part",
}


class Held(NamedTuple):
    """A matrix in a picture: what stands before it, its name, its shape, and which part a GPU has.

    part: "whole" (each GPU has all of it), "rows" or "columns" (each has its own), or "partial" (each
    has all places, and the sum over the GPUs is the matrix).
    """

    before: str
    name: str
    rows: int
    columns: int
    part: str


def held(tensors: Sequence[tuple[str, str, int, int, str]], gpus: int, message: str) -> None:
    """One row a GPU, one column a matrix: the outline is the whole matrix, the colour what it has.

    tensors: as ``Held``. ValueError for a part that is none of the four.
    """
    drawn = [Held(*tensor) for tensor in tensors]
    for tensor in drawn:
        if tensor.part not in _SAID:
            raise ValueError(f"{tensor.name} is held {tensor.part!r}; parts are {', '.join(_SAID)}")
    scale = 2.0 / max(max(tensor.rows, tensor.columns) for tensor in drawn)
    height = scale * max(tensor.rows for tensor in drawn)
    places, width = [], 0.9
    for tensor in drawn:
        width += 0.16 * len(tensor.before) + 0.2
        places.append(width)
        width += max(scale * tensor.columns, 0.11 * len(tensor.name)) + 0.25
    made, axes = figure(width=min(9.0, 0.9 * width), height=0.9 + gpus * (height + 0.35) * 0.8)
    for gpu in range(gpus):
        middle = gpu * (height + 0.35)
        axes.text(0.0, middle, f"GPU {gpu}", va="center")
        for left, tensor in zip(places, drawn, strict=True):
            axes.text(left - 0.12, middle, tensor.before, ha="right", va="center")
            _matrix(axes, left, middle, scale, tensor, gpu, gpus)
    for left, tensor in zip(places, drawn, strict=True):
        centre = left + scale * tensor.columns / 2
        axes.text(centre, -height / 2 - 0.22, tensor.name, ha="center", fontsize=9)
    axes.set(xlim=(-0.05, width), ylim=(gpus * (height + 0.35) - height / 2, -height / 2 - 0.45))
    axes.set_aspect("equal")
    axes.axis("off")
    title(axes, message, "coloured: what a GPU holds; hatched: one part of a sum")
    told = ", ".join(
        f"{tensor.name} ({tensor.rows} by {tensor.columns}) {_SAID[tensor.part]}"
        for tensor in drawn
    )
    show(
        made,
        f"A row for each of {gpus} GPUs. {message}. Each GPU holds, from left to right: {told}.",
    )


def _matrix(
    axes: Axes, left: float, middle: float, scale: float, tensor: Held, gpu: int, gpus: int
) -> None:
    width, height = scale * tensor.columns, scale * tensor.rows
    top = middle - height / 2
    axes.add_patch(Rectangle((left, top), width, height, fill=False, ec="#BBBBBB", ls=":"))
    x, y, w, h = left, top, width, height
    if tensor.part == ROWS:
        y, h = top + gpu * height / gpus, height / gpus
    elif tensor.part == COLUMNS:
        x, w = left + gpu * width / gpus, width / gpus
    hatch = "////" if tensor.part == PARTIAL else None
    colour = RANK_COLOURS[gpu]
    axes.add_patch(Rectangle((x, y), w, h, fc=colour, ec="#444444", lw=0.8, hatch=hatch, alpha=0.9))


def split_times(timelines: Mapping[str, Timeline], message: str) -> None:
    """A bar for each timeline: its makespan, and how much of it the collectives take."""
    made, axes = figure(width=7.5, height=0.9 + 0.42 * len(timelines))
    names = list(timelines)[::-1]
    found = [parts_of(timelines[name]) for name in names]
    rest = [1e3 * (whole - sent) for whole, sent in found]
    sent = [1e3 * sent for _, sent in found]
    axes.barh(names, rest, 0.6, color=COLOURS["sky"], label="everything else")
    axes.barh(names, sent, 0.6, rest, color=COLOURS["vermilion"], label="collectives")
    for place, (whole, part) in enumerate(found):
        axes.text(1e3 * whole, place, f" {part / whole:.0%}", va="center")
    axes.set(xlabel="ms", xlim=(0, 1.15e3 * max(whole for whole, _ in found)))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    gpu = next(iter(timelines.values())).gpu
    title(axes, message, f"forward and backward of one layer, virtual time, {gpu}")
    told = "; ".join(
        f"{name}: {1e3 * whole:.2f} ms, {part / whole:.0%} of it in collectives"
        for name, (whole, part) in zip(names[::-1], found[::-1], strict=True)
    )
    show(made, f"Bars of the time of a layer and the collectives' share in it. {told}.")


def parts_of(timeline: Timeline) -> tuple[float, float]:
    """Seconds of a timeline, and those in which its collectives are on their way."""
    sent_s = sum(e.duration_s for e in timeline.events if e.kind == "collective")
    return timeline.makespan_s, sent_s


def gained(times_s: Mapping[int, Mapping[int, float]], message: str, how: str) -> None:
    """A line for each number of GPUs: how many times as fast as one, over the width of the layer.

    times_s: width → {number of GPUs: seconds}, with 1 among the numbers.
    """
    made, axes = figure(width=6.5, height=3.4)
    widths = sorted(times_s)
    counts = [count for count in times_s[widths[0]] if count > 1]
    colours = [COLOURS[name] for name in ("blue", "green", "vermilion", "purple")]
    for colour, marker, count in zip(colours, "osD^", counts, strict=False):
        gains = [times_s[width][1] / times_s[width][count] for width in widths]
        axes.plot(widths, gains, marker=marker, color=colour, label=f"{count} GPUs")
        axes.axhline(count, color=colour, lw=0.8, ls=":", label=f"{count} times")
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set(xlabel="width of the layer", ylabel="times as fast as one GPU", ylim=(0, None))
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left")
    title(axes, message, how)
    told = "; ".join(
        f"{count} GPUs: "
        + ", ".join(f"{times_s[w][1] / times_s[w][count]:.2f} at width {w}" for w in widths)
        for count in counts
    )
    show(made, f"Lines of how many times as fast as one GPU, over the width. {told}.")
