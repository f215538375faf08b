"""Figures for pipeline schedules: one row per device, one numbered box per action, over time."""

from collections.abc import Mapping
from functools import cache

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from helpers.plots.style import COLORS, figure, show, title
from vgpu.plan.schedules import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    SimulatedSchedule,
)

_LOOKS = {
    FORWARD: ("forward", COLORS["blue"]),
    BACKWARD: ("backward", COLORS["orange"]),
    INPUT_GRADIENT: ("backward: input", COLORS["orange"]),
    WEIGHT_GRADIENT: ("backward: weights", COLORS["green"]),
}
# Numbers are shown if their boxes have at least this much room, in inches per digit.
_DIGIT_INCHES = 0.085
# With less room than this for a digit, all of a figure's numbers are smaller.
_AMPLE_INCHES = 0.13


def schedule(
    simulated: SimulatedSchedule,
    message: str | None = None,
    *,
    how: str = "counted in units of time",
    unit: str = "time units",
    factor: float = 1,
    until: float | None = None,
    axes: Axes | None = None,
) -> None:
    """Draw a schedule; the number in a box is its micro-batch, and a paler box is a later chunk.

    The title is ``message``, by default the schedule's name and bubble. Times are multiplied by
    ``factor`` and labeled ``unit``. ``until`` is the end of the axis, in the unit of ``simulated``;
    set it to draw multiple schedules on one scale. Without ``axes``, a figure is created and shown.
    """
    plan = simulated.schedule
    fig = None
    if axes is None:
        fig, axes = figure(width=9, height=1.35 + 0.36 * plan.devices)
    end = (until or simulated.makespan) * factor
    for row, boxes in enumerate(simulated.boxes):
        spans = [(box.start * factor, (box.end - box.start) * factor) for box in boxes]
        colors = [_color(box.action.kind, box.action.stage // plan.devices) for box in boxes]
        axes.broken_barh(
            spans, (row - 0.42, 0.84), facecolors=colors, edgecolor="white", linewidth=0.7
        )
    axes.set_xlim(0, end)
    axes.set_yticks(range(plan.devices), [f"device {d}" for d in range(plan.devices)])
    axes.set(ylim=(plan.devices - 0.5, -0.5), xlabel=unit)
    axes.grid(visible=False)
    axes.set_facecolor("#EEEEEE")  # whatever isn't covered by a box is the bubble
    _numbers(axes, simulated, factor, end)
    _legend(axes, simulated)
    heading = message or f"{plan.name}: {simulated.bubble:.0%} bubble"
    title(axes, heading, how)
    if fig is not None:
        show(fig, _alt(simulated, heading, unit, factor))


def schedules(simulations: Mapping[str, SimulatedSchedule]) -> None:
    """Draw multiple schedules, one below the other, on one time scale, titled with their names."""
    rows = [simulated.schedule.devices for simulated in simulations.values()]
    fig, axes = figure(
        len(simulations),
        width=9,
        height=sum(1.2 + 0.3 * count for count in rows),
        gridspec_kw={"height_ratios": [1.2 + 0.3 * count for count in rows]},
        squeeze=False,
    )
    until = max(simulated.makespan for simulated in simulations.values())
    texts = []
    for panel, (name, simulated) in zip(axes.flat, simulations.items(), strict=True):
        heading = f"{name}: {simulated.bubble:.0%} bubble"
        schedule(simulated, heading, until=until, axes=panel)
        texts.append(_alt(simulated, heading, "units", 1))
    show(fig, " ".join(texts))


def _alt(simulated: SimulatedSchedule, heading: str, unit: str, factor: float) -> str:
    """Say how long the schedule takes, and when each device starts its first backward."""
    first = [
        next(box.start for box in boxes if box.action.kind != FORWARD) for boxes in simulated.boxes
    ]
    return (
        f"Rows of numbered boxes, one for each of {simulated.schedule.devices} devices, over "
        f"{simulated.makespan * factor:.4g} {unit}: {heading}. The first backward begins at "
        f"{', '.join(f'{start * factor:.4g}' for start in first)}, device by device."
    )


def _color(kind: str, chunk: int) -> tuple[float, float, float]:
    """Return the color of a kind of action, paler for each later chunk."""
    red, green, blue = to_rgb(_LOOKS[kind][1])
    pale = 1 - 0.62**chunk
    return red + (1 - red) * pale, green + (1 - green) * pale, blue + (1 - blue) * pale


def _ink(color: tuple[float, float, float]) -> str:
    """Return black or white, whichever reads better on ``color`` (WCAG 2, relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"


def _numbers(axes: Axes, simulated: SimulatedSchedule, factor: float, end: float) -> None:
    """Number each box with its micro-batch, if all boxes of its kind have room for a number.

    The numbers are a single artist, because separate text objects would take seconds.
    """
    fig = axes.get_figure(root=True)
    assert fig is not None
    inches = fig.get_figwidth() * 0.75 / end
    # Boxes of one kind are either all numbered or all unnumbered.
    room: dict[str, float] = {}  # for a digit, in the narrowest box of each kind
    for box in (box for boxes in simulated.boxes for box in boxes):
        digit = (box.end - box.start) * factor * inches / len(str(box.action.micro_batch))
        room[box.action.kind] = min(digit, room.get(box.action.kind, digit))
    cramped = {kind for kind, digit in room.items() if digit < _DIGIT_INCHES}
    ample = all(digit >= _AMPLE_INCHES for kind, digit in room.items() if kind not in cramped)
    size = 8 if ample else 6
    written, middles, inks = [], [], []
    for row, boxes in enumerate(simulated.boxes):
        for box in boxes:
            text = str(box.action.micro_batch)
            if box.action.kind not in cramped:
                written.append(number_path(text, size))
                middles.append(((box.start + box.end) / 2 * factor, row))
                chunk = box.action.stage // simulated.schedule.devices
                inks.append(_ink(_color(box.action.kind, chunk)))
    numbers = PathCollection(
        written,
        offsets=middles,
        offset_transform=axes.transData,
        transform=Affine2D().scale(1 / 72) + fig.dpi_scale_trans,  # points
        facecolors=inks,
        linewidths=0,
    )
    numbers.set_in_layout(False)  # the numbers are inside the boxes, so they need no extra room
    if written:
        axes.add_collection(numbers, autolim=False)


@cache
def number_path(text: str, size: int) -> Path:
    """Return the outline of a number at ``size`` points, centered at the origin."""
    outline = TextPath((0, 0), text, size=size)
    x0, y0, x1, y1 = outline.get_extents().extents
    return Affine2D().translate(-(x0 + x1) / 2, -(y0 + y1) / 2).transform_path(outline)


def _legend(axes: Axes, simulated: SimulatedSchedule) -> None:
    kinds = {action.kind for action in simulated.schedule.actions}
    devices, chunks = simulated.schedule.devices, simulated.schedule.chunks
    handles = []
    for kind, (label, _) in _LOOKS.items():
        if kind in kinds:
            for chunk in range(chunks):
                which = f", chunk {chunk}" if chunks > 1 else ""
                handles.append(Patch(color=_color(kind, chunk), label=label + which))
    handles.append(Patch(facecolor="#EEEEEE", edgecolor="#999999", label="bubble"))
    columns = 1 if len(handles) <= 2 * devices else 2
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, ncols=columns)
