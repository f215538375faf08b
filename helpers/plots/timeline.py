"""Figures for virtual time: one lane per stream, one bar per stretch of one kind of work."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from helpers.plots.style import COLORS, arrow, figure, legend_beside, show, title
from vgpu import Timeline, TraceEvent, covered_s
from vgpu.units import format_bytes, format_seconds

_OF_KIND = {
    "forward": COLORS["blue"],
    "backward": COLORS["orange"],
    "other kernels": COLORS["green"],
    "copy": COLORS["vermilion"],
    "collective": COLORS["purple"],
    "collective, waiting": "#F3DDEA",  # hatched
    "host at work": "#D5D5D5",
    "host in one long operation": COLORS["sky"],
    "wait": "#777777",
}
_HATCHED = "collective, waiting"
# Two bars separated by less than this fraction of the axis are drawn as one.
_INVISIBLE = 1 / 2000
# A bar narrower than this fraction of the axis is a hairline; a lane with only hairlines looks
# empty.
_HAIRLINE = 1 / 500
# An operation of the host that takes at least this fraction of a recording is long.
_LONG = 1 / 20
# The share of the time axis that a kind must cover in a lane to be in the legend.
_NOTICED = 1 / 300
# Height in inches above the lanes, below them, and per lane.
_TOP, _BOTTOM, _LANE = 0.65, 0.55, 0.45


def timeline(
    record: Timeline,
    message: str = "What each GPU does, and when",
    *,
    as_in_trace: bool = False,
    until_s: float | None = None,
    devices: Sequence[torch.device] | None = None,
    lane_names: Sequence[str] | None = None,
    notes: Mapping[str, tuple[int, float, float]] | None = None,
    ddp: bool = False,
) -> None:
    """Draw a recording, one lane for each stream of each GPU, with ``message`` as the title.

    With ``as_in_trace``, a collective starts when its own rank arrives and is hatched until the
    last rank has arrived. ``until_s`` is the end of the axis; set it to draw multiple recordings on
    one scale. ``devices`` are the GPUs to draw, by default all of them. ``lane_names`` are the
    lanes' names, from top to bottom. ``notes`` are texts to write in a lane, each between two times
    in seconds. ``ddp`` says that it's an iteration of DDP, whose copies out of the buckets are
    drawn as other kernels. Non-default streams whose bars would all be hairlines are left out, and
    the line below the title says how many.
    """
    end_s = until_s or record.makespan_s or 1.0
    every = lanes_of(record, devices=devices)
    if as_in_trace:
        every = {name: _with_waiting(events) for name, events in every.items()}
    lanes, left_out = visible(every, end_s)
    if ddp:
        lanes = _without_copies_out(lanes)
    if lane_names is not None:
        lanes = dict(zip(lane_names, lanes.values(), strict=True))
    height = _TOP + _LANE * len(lanes) + _BOTTOM
    fig, axes = figure(width=8.5, height=height)
    # The axes are in the same place in every figure, and all figures have the same width, so that
    # two can be compared.
    fig.set_layout_engine("none")
    axes.set_position((0.15, _BOTTOM / height, 0.67, 1 - (_TOP + _BOTTOM) / height))
    fig.add_artist(Rectangle((0, 0), 1, 1, transform=fig.transFigure, fill=False, linewidth=0))
    _draw(axes, record, message, lanes, end_s, left_out)
    for text, (lane, start_s, stop_s) in (notes or {}).items():
        middle = (start_s + stop_s) / 2 * _unit(end_s)[0]
        axes.text(middle, lane, text, ha="center", va="center", fontsize=8)
    said = f" In the gaps: {'; '.join(notes)}." if notes else ""
    show(fig, _alt(record, lanes) + said)


def overlap(record: Timeline, message: str) -> None:
    """Draw one rank's iteration of DDP; label each collective with its purpose and its size."""
    events = record.of(record.devices[0])
    lanes, left_out = visible(lanes_of(record, devices=record.devices[:1]), record.makespan_s)
    lanes = _without_copies_out(lanes)
    assert len(lanes) == 2, f"a lane for computing and one for collectives, not {[*lanes]}"
    fig, axes = figure(width=8.5, height=2.5)
    _draw(axes, record, message, lanes, record.makespan_s, left_out)
    factor = 1e3 if axes.get_xlabel() == "ms" else 1e6
    notes: dict[str, tuple[float, int, str]] = {}  # (time, lane, alignment)
    sends = [event for event in events if event.kind == "collective"]
    buffers = [event for event in sends if event.name == "broadcast"]
    if buffers:
        notes["buffers"] = buffers[0].start_s, 1, "left"
    reduces = [event for event in sends if event.name == "all_reduce"]
    for event in reduces:
        notes[format_bytes(event.size_bytes)] = (event.start_s + event.end_s) / 2, 1, "center"
    last = [event for event in events if event.start_s >= max(e.end_s for e in reduces)]
    if last:
        copies = "copies out of the buckets, then " if any(e.backward for e in last) else ""
        notes[f"{copies}the optimizer"] = last[-1].end_s, 0, "right"
    for text, (time_s, lane, side) in notes.items():
        place: Any = {"va": "top" if lane else "bottom", "ha": side, "fontsize": 8}
        axes.text(factor * time_s, 1.42 if lane else -0.42, text, **place)
    axes.set_ylim(1.85, -1.05)
    show(fig, f"{_alt(record, lanes)} Labels, from left to right: {', '.join(notes)}.")


def _without_copies_out(
    lanes: Mapping[str, Sequence[TraceEvent]],
) -> dict[str, list[TraceEvent]]:
    """Return DDP's events with its copies out of the buckets no longer counted as backward.

    They're what autograd launches after the last all-reduce, when backward is over.
    """
    reduced_s = max(e.end_s for lane in lanes.values() for e in lane if e.name == "all_reduce")
    return {
        name: [
            event._replace(backward=False, module="") if event.start_s >= reduced_s else event
            for event in lane
        ]
        for name, lane in lanes.items()
    }


def _with_waiting(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return the events, plus a waiting event before each collective that waits for other ranks."""
    waiting = [
        event._replace(kind=_HATCHED, start_s=event.ready_s, end_s=event.start_s)
        for event in events
        if event.ready_s is not None and event.waited_s > 0
    ]
    return sorted([*events, *waiting], key=lambda event: event.start_s)


def _host_of_rank_0(record: Timeline) -> list[TraceEvent]:
    """Return the events of rank 0's host: when it launches kernels or works, and when it waits."""
    gpu = record.devices[0]
    own = record.of(gpu)
    blank = own[0]._replace(kind="host at work", device=torch.device("cpu"), stream=0, ready_s=None)
    spans = {(event.launch_s - event.launching_s, event.launch_s) for event in own}
    spans |= {
        (r.start_s, r.end_s) for r in record.host_ranges if r.kind == "work" and r.device == gpu
    }
    long_s = _LONG * record.makespan_s
    works = [
        blank._replace(
            kind="host in one long operation" if end_s - start_s > long_s else blank.kind,
            start_s=start_s,
            end_s=end_s,
        )
        for start_s, end_s in spans
    ]
    waits = [event for event in record.of(torch.device("cpu")) if event.stream == 0]
    return sorted([*works, *waits], key=lambda event: event.start_s)


def traces(records: Mapping[str, Timeline]) -> None:
    """Draw several runs as their traces show them, each on its own time scale, with one legend.

    Draws GPUs 0 and 2 and rank 0's host, or all GPUs if they send to each other.
    """
    every = {}
    for name, record in records.items():
        sends = any(event.name == "send" for event in record.events)
        lanes = lanes_of(record, devices=record.devices if sends else record.devices[::2])
        with_waits = {lane: _with_waiting(events) for lane, events in lanes.items()}
        with_waits["host of rank 0"] = _host_of_rank_0(record)
        drawn, _ = visible(with_waits, record.makespan_s)
        every[name] = {lane.replace("vgpu:", "GPU "): events for lane, events in drawn.items()}
    two_lines = {name: "\n" in "".join(lanes) for name, lanes in every.items()}
    heights = [
        (0.4 if two_lines[name] else 0.2) * len(lanes) + 0.62 for name, lanes in every.items()
    ]
    shape: Any = {"gridspec_kw": {"height_ratios": heights}, "squeeze": False}
    fig, grid = figure(len(records), width=8.5, height=sum(heights) + 0.5, **shape)
    handles: dict[str, Any] = {}
    for axes, (name, lanes) in zip(grid.flat, every.items(), strict=True):
        _draw(axes, records[name], name, lanes, records[name].makespan_s, 0)
        handles |= _without_legend(axes)
        axes.tick_params(labelsize=8)
    legend: Any = {"loc": "outside upper left", "ncols": 4, "fontsize": 8}
    fig.legend(handles=[handles[kind] for kind in _OF_KIND if kind in handles], **legend)
    show(fig, " ".join(f"{name}: {_alt(records[name], lanes)}" for name, lanes in every.items()))


def spans(lanes: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], message: str) -> None:
    """Draw spans of measured traces: for each lane, groups of events with ``ts`` and ``dur``.

    Later groups are drawn over earlier ones.
    """
    fig, axes = figure(width=8.5, height=0.9 + 0.55 * len(lanes))
    groups = {name: None for lane in lanes.values() for name in lane}
    first = min(
        event["ts"] for lane in lanes.values() for group in lane.values() for event in group
    )
    colors = dict(zip(groups, (COLORS["gray"], COLORS["blue"], COLORS["purple"]), strict=False))
    for row, lane in enumerate(lanes.values()):
        for name, events in lane.items():
            boxes = [((event["ts"] - first) / 1e3, event["dur"] / 1e3) for event in events]
            axes.broken_barh(boxes, (row - 0.3, 0.6), facecolor=colors[name])
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set(ylim=(len(lanes) - 0.5, -0.6), xlabel="ms")
    axes.grid(axis="y", visible=False)
    legend_beside(axes, handles=[Patch(color=color, label=name) for name, color in colors.items()])
    title(axes, message, "measured")
    texts = (
        f"{label}: {name} {sum(event['dur'] for event in events) / 1e3:.0f} ms"
        for label, lane in lanes.items()
        for name, events in lane.items()
    )
    show(fig, f"Bars in one lane for each of {len(lanes)} ranks. Totals: {'; '.join(texts)}.")


def launches(traces: Mapping[str, Sequence[Mapping[str, Any]]], count: int) -> None:
    """Draw each trace's first ``count`` kernels and their launches, with arrows between them.

    ``traces`` maps a name to a trace's events, as in ``traceEvents``. Each trace has its own time
    axis.
    """
    fig, panels = figure(len(traces), width=8.5, height=1.9 * len(traces), squeeze=False)
    summary = []
    for axes, (name, events) in zip(panels.flat, traces.items(), strict=True):
        spans = [event for event in events if event.get("ph") == "X"]
        started = {
            event["args"]["correlation"]: event
            for event in spans
            if event["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
        }
        kernels = sorted((e for e in spans if e["cat"] == "kernel"), key=lambda e: e["ts"])[:count]
        pairs = [(started[kernel["args"]["correlation"]], kernel) for kernel in kernels]
        first = min(launch["ts"] for launch, _ in pairs)
        for launch, kernel in pairs:
            for lane, span, color in ((0, launch, "gray"), (1, kernel, "blue")):
                box = [(span["ts"] - first, span["dur"])], (lane - 0.25, 0.5)
                axes.broken_barh(*box, facecolor=COLORS[color], edgecolor="white", linewidth=0.5)
            start = launch["ts"] + launch["dur"] - first, 0.25
            arrow(axes, start, (kernel["ts"] - first, 0.75), linewidth=0.8, mutation_scale=8)
        end = max(kernel["ts"] + kernel["dur"] for kernel in kernels) - first
        axes.set_yticks([0, 1], ["launches", "kernels"])
        axes.set(ylim=(1.5, -0.5), xlim=(0, 1.02 * end), xlabel="µs")
        axes.grid(axis="y", visible=False)
        title(axes, name, "virtual time; arrows: from a launch to its kernel")
        launched = pairs[-1][0]["ts"] + pairs[-1][0]["dur"] - first
        if launched < end / 10:  # too narrow to be counted
            axes.text(
                launched + end / 60, -0.1, f"{count} launches in {launched:.0f} µs", va="center"
            )
        late = [kernel["ts"] - launch["ts"] - launch["dur"] for launch, kernel in pairs]
        summary.append(f"{name}: kernel {count} starts {late[-1]:,.0f} µs after its launch")
    show(fig, f"Launches above, kernels below, and arrows between them. {'; '.join(summary)}.")


def timelines(
    records: Mapping[str, Timeline],
    *,
    host: bool = False,
    devices: Sequence[torch.device] | None = None,
    lane_names: Sequence[str] | None = None,
    numbered: Sequence[str] = (),
) -> None:
    """Draw multiple recordings, one below the other, on one time scale, with their names as titles.

    They share one legend. ``lane_names`` are the names of each recording's lanes, from top to
    bottom; a recording may have fewer lanes. In the recordings named in ``numbered``, each piece of
    the batch gets its number.
    """
    end_s = max(record.makespan_s for record in records.values())
    every = {
        name: visible(lanes_of(record, host, devices), end_s) for name, record in records.items()
    }
    if lane_names is not None:
        every = {
            name: (dict(zip(lane_names[: len(lanes)], lanes.values(), strict=True)), 0)
            for name, (lanes, _) in every.items()
        }
    heights = [_TOP + _BOTTOM + _LANE * len(lanes) for lanes, _ in every.values()]
    fig, grid = figure(
        len(records),
        width=8.5,
        height=sum(heights),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
    )
    handles: dict[str, Any] = {}
    for axes, (name, record) in zip(grid.flat, records.items(), strict=True):
        lanes, left_out = every[name]
        _draw(axes, record, name, lanes, end_s, left_out)
        if name in numbered:
            _number_pieces(axes, lanes, _unit(end_s)[0])
        handles |= _without_legend(axes)
    legend_beside(grid.flat[0], handles=[handles[kind] for kind in _OF_KIND if kind in handles])
    summary = (f"{name}: {_alt(record, every[name][0])}" for name, record in records.items())
    show(fig, " ".join(summary))


def _draw(
    axes: Axes,
    record: Timeline,
    message: str,
    lanes: Mapping[str, list[TraceEvent]],
    end_s: float,
    left_out: int,
) -> None:
    factor, unit = _unit(end_s)
    for row, events in enumerate(lanes.values()):
        bars: dict[str, list[tuple[float, float]]] = {}
        for kind, start_s, stop_s in stretches(events, end_s * _INVISIBLE):
            bars.setdefault(kind, []).append((start_s * factor, (stop_s - start_s) * factor))
        for kind, spans in bars.items():
            edge = 0.7 if kind == "collective" else 0  # in points; separates adjacent collectives
            height = (row - 0.36, 0.72)
            hatch: Any = {}
            if kind == _HATCHED:
                hatch, edge = {"hatch": "/////"}, 0
            axes.broken_barh(
                spans,
                height,
                facecolor=_OF_KIND[kind],
                edgecolor=COLORS["purple"] if hatch else "white",
                linewidth=edge,
                **hatch,
            )
    # A non-default stream is below its GPU's default one, which has the GPU's name.
    axes.set_yticks(range(len(lanes)), [name.rpartition(", ")[2] for name in lanes])
    axes.set(ylim=(len(lanes) - 0.4, -0.6), xlim=(0, end_s * factor), xlabel=unit)
    axes.grid(axis="y", visible=False)
    seen = {
        kind
        for kind in _OF_KIND
        for events in lanes.values()
        if covered_s(e for e in events if kind_of(e) == kind) > end_s * _NOTICED
    }
    handles: Any = [
        Patch(fc=color, ec=COLORS["purple"], lw=0, hatch="/////", label=k)
        if k == _HATCHED
        else Patch(color=color, label=k)
        for k, color in _OF_KIND.items()
        if k in seen
    ]
    legend_beside(axes, handles=handles)
    how = f"virtual time, {record.gpu}"
    if left_out:
        streams = "a stream that is" if left_out == 1 else f"{left_out} streams that are"
        how += f"; omits {streams} busy only briefly"
    title(axes, message, how)


def _without_legend(axes: Axes) -> dict[str, Any]:
    """Remove the axes' legend, and return its handles by their labels."""
    legend: Any = axes.get_legend()
    legend.remove()
    return {handle.get_label(): handle for handle in legend.legend_handles}


def _unit(end_s: float) -> tuple[float, str]:
    """Return the unit for an axis that ends at ``end_s``: how many make a second, and its name."""
    return (1.0, "s") if end_s >= 1 else (1e3, "ms") if end_s >= 1e-3 else (1e6, "µs")


def _number_pieces(axes: Axes, lanes: Mapping[str, list[TraceEvent]], factor: float) -> None:
    """Write a piece's number on its forward and on its backward pass through each lane's stage.

    A pass begins with the forward of the lane's first module, and ends with its backward. Autograd
    runs the last piece backward first.
    """
    for row, events in enumerate(lanes.values()):
        kernels = [event for event in events if event.kind == "kernel" and event.module]
        forwards = [event for event in kernels if not event.backward]
        backwards = [event for event in kernels if event.backward]
        if not forwards or not backwards:
            continue
        module, name = forwards[0].module, forwards[0].name
        starts = [e.start_s for e in forwards if (e.module, e.name) == (module, name)]
        own = [event for event in backwards if event.module == module]
        ends = [event.end_s for event in own if event.name == own[0].name]
        each = max(1, len(ends) // len(starts))  # a Linear's backward, for example, is two matmuls
        ends = ends[each - 1 :: each]
        passes = [
            *(("white", e, forwards) for e in pairwise([*starts, forwards[-1].end_s])),
            *(("black", e, backwards) for e in pairwise([backwards[0].start_s, *ends])),
        ]
        numbers = [*range(1, len(starts) + 1), *range(len(ends), 0, -1)]
        for number, (color, (begin_s, end_s), kind) in zip(numbers, passes, strict=True):
            inside = [event for event in kind if begin_s <= event.start_s < end_s]
            middle = (inside[0].start_s + inside[-1].end_s) / 2 * factor
            place: Any = {"ha": "center", "va": "center", "fontsize": 8, "color": color}
            axes.text(middle, row, str(number), **place)


def _alt(record: Timeline, lanes: Mapping[str, list[TraceEvent]]) -> str:
    """Say what fraction of the recording's time each kind of work takes in each lane."""
    summary = []
    for name, events in lanes.items():
        kinds: dict[str, float] = {}
        for kind in _OF_KIND:
            covering_s = covered_s(event for event in events if kind_of(event) == kind)
            if covering_s:
                kinds[kind] = covering_s / record.makespan_s
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in kinds.items())
        summary.append(f"{name} {shares or 'idle'}")
    return (
        f"Bars in lanes, spanning {format_seconds(record.makespan_s)}. By share of that time: "
        f"{'; '.join(summary)}."
    )


def lanes_of(
    record: Timeline, host: bool = False, devices: Sequence[torch.device] | None = None
) -> dict[str, list[TraceEvent]]:
    """Map each lane's name to its events; every GPU has a lane, even if it did nothing.

    A non-default stream's lane is named after what it does: "vgpu:0, copies out". Streams that
    do the same are named after their link if they use only one: "vgpu:0, over NVLink".
    """
    lanes: dict[str, list[TraceEvent]] = {}
    for device in record.devices if devices is None else devices:
        streams = {
            stream: [event for event in record.of(device) if event.stream == stream]
            for stream in record.streams(device) or [0]
        }
        works = {stream: _work_of(events) for stream, events in streams.items() if stream}
        for stream, events in streams.items():
            own = _name_of(record, device)
            name = f"{own}, {works[stream]}" if stream else own
            if stream and list(works.values()).count(works[stream]) > 1:
                name = f"{own}, {_link_of(events) or works[stream]}"
            while name in lanes:
                name += " "  # two streams that do the same kind of work
            lanes[name] = events
    if host:
        lanes["host"] = record.of(torch.device("cpu"))
    return lanes


def visible(
    lanes: Mapping[str, list[TraceEvent]], end_s: float
) -> tuple[dict[str, list[TraceEvent]], int]:
    """Return the lanes without non-default streams that would look empty, and how many were left out."""
    seen = {
        name: events
        for name, events in lanes.items()
        if ", " not in name
        or any(
            stop_s - start_s >= end_s * _HAIRLINE
            for _, start_s, stop_s in stretches(events, end_s * _INVISIBLE)
        )
    }
    return seen, len(lanes) - len(seen)


def _name_of(record: Timeline, device: torch.device) -> str:
    """Return a GPU's name or, for a cluster's joined ranks, the rank: GPU numbers are per host."""
    ranks = record.ranks
    if len(ranks) == 1 or ranks == list(range(len(ranks))):
        return str(device)
    return f"rank {ranks[record.devices.index(device)]}"


def _work_of(events: Sequence[TraceEvent]) -> str:
    """Say in a word or two what a stream does, or return its number if it does different things."""
    kinds = {event.kind for event in events}
    names = sorted({event.name for event in events})
    if kinds == {"collective"}:
        pairs = {event.ranks for event in events}
        if len(pairs) == 1 and names in (["send"], ["recv"]):
            _, peer = pairs.pop()
            return f"{names[0]} {'to' if names == ['send'] else 'from'} {peer}"
        return ",\n".join(names).replace("_", "-") if len(names) < 3 else "collectives"
    if kinds == {"copy"}:
        ways = {"in" if event.device == event.target else "out" for event in events}
        return f"copies {ways.pop()}" if len(ways) == 1 else "copies"
    if kinds == {"kernel"} and all("copy" in event.name for event in events):
        return "copies"
    return names[0] if len(names) == 1 else f"stream {events[0].stream}"


def _link_of(events: Sequence[TraceEvent]) -> str:
    """Return "over NVLink" if all events use links of that kind, otherwise an empty string."""
    links = {event.link.partition(" ")[0] for event in events}
    return f"over {links.pop()}" if len(links) == 1 and links != {""} else ""


def kind_of(event: TraceEvent) -> str:
    """Return an event's kind, shown by its color: forward (of a module), backward, copy etc."""
    if event.kind != "kernel":
        return event.kind
    if event.stream and "copy" in event.name:
        return "copy"  # such as FSDP2's, into the buffer that it gathers
    if event.backward:
        return "backward"
    return "forward" if event.module else "other kernels"


def stretches(events: list[TraceEvent], gap_s: float) -> list[tuple[str, float, float]]:
    """Merge events of one kind less than ``gap_s`` seconds apart, as (kind, start, end) tuples.

    Thousands of kernels become a few bars, which keeps drawing fast and files small. A collective
    right after another gets its own bar if it takes at least 10 times ``gap_s``, to show how many
    collectives there are.
    """
    stretched: list[tuple[str, float, float]] = []
    for event in events:
        kind = kind_of(event)
        countable = kind == "collective" and event.end_s - event.start_s >= 10 * gap_s
        same = stretched and stretched[-1][0] == kind and not countable
        if same and event.start_s - stretched[-1][2] < gap_s:
            stretched[-1] = (kind, stretched[-1][1], max(stretched[-1][2], event.end_s))
        else:
            stretched.append((kind, event.start_s, event.end_s))
    return stretched
