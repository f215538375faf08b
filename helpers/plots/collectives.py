"""Figures for collectives and DDP: data before and after, a ring's steps, samplers, bytes sent.

In the lesson, rank r starts with small numbers times 10**r, so a value shows which ranks
contributed to it: 110 is a sum over ranks 1 and 2. A cell's value determines its colors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from helpers.plots.style import COLORS, RANK_COLORS, figure, show, text_near, title
from vgpu.units import format_bytes, format_seconds

# In units of cells: the gap between the blocks of a row, and the width of the widest row.
_GAP, _WIDEST = 1.3, 19.5


Held = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


def origins(number: int) -> list[int]:
    """Return the ranks that contributed to a sum: the positions of its nonzero digits."""
    return [rank for rank, digit in enumerate(reversed(str(number))) if digit != "0"]


def before_and_after(
    held: dict[str, Held], message: str, undefined: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Draw what each rank holds before, and then after each collective: a row of cells per rank.

    ``held`` maps a collective's name to a ``(before, after)`` pair of tensors per rank, whose
    values are encoded as described above; ``after`` is None on a rank that receives nothing. All
    collectives start with the same tensors. ``undefined`` names the ranks whose results are
    undefined; they're faded.
    """
    starts = [before for before, _ in next(iter(held.values()))]
    blocks = {name: [after for _, after in runs] for name, runs in held.items()}
    ranks, first = len(starts), len(starts[0]) + _GAP + 0.9
    places, x, y, right = {"before": (0.0, 0.0)}, first, 0.0, 0.0
    for name, tensors in blocks.items():
        width = max(len(name) * 0.24, *(len(_numbers(tensor)) for tensor in tensors))
        width += 2.2 if (undefined or {}).get(name) else 0
        if x > first and x + width > _WIDEST:
            x, y = first, y + ranks + 1.8
        places[name] = x, y
        right, x = max(right, x + width), x + width + _GAP
    rows = y + ranks + 1.2
    fig, axes = figure(width=0.42 * (right + 1.5), height=0.55 + 0.29 * rows)
    for name, (left, top) in places.items():
        axes.text(left, top - 0.85, name, fontweight="bold", va="center", in_layout=False)
        for rank, tensor in enumerate(blocks.get(name, starts)):
            if left in (0, first):
                look: Any = {"ha": "right", "va": "center", "fontsize": 9, "in_layout": False}
                axes.text(left - 0.2, top + rank, f"rank {rank}", **look)
            fades = rank in (undefined or {}).get(name, ())
            _row(axes, left, top + rank, _numbers(tensor), faded=fades)
            aside = "undefined" if fades else "nothing" if tensor is None else ""
            axes.text(
                left + len(_numbers(tensor)) + 0.05,
                top + rank,
                aside,
                va="center",
                color="#666666",
                style="italic",
                in_layout=False,
            )
    axes.set(xlim=(-1.4, right), ylim=(rows - 1.7, -1.4))
    axes.axis("off")
    title(axes, message, f"values returned by {ranks} real ranks")
    summary = "; ".join(
        f"{name} leaves "
        + ", ".join(
            f"rank {rank} with {_numbers(after) or 'nothing'}" for rank, after in enumerate(tensors)
        )
        for name, tensors in blocks.items()
    )
    begin = ", ".join(str(_numbers(before)) for before in starts)
    show(
        fig,
        f"Rows of cells, one per rank, before and after. The ranks start with {begin}; {summary}.",
    )


def busiest_rank(counted: dict[str, dict[int, float]]) -> None:
    """Plot the bytes that the busiest rank sends, as a multiple of the tensor's size, by number of ranks.

    ``counted`` maps an algorithm's name to {number of ranks: multiple}.
    """
    fig, axes = figure(width=6.5, height=3.2)
    looks = (("o", COLORS["vermilion"]), ("s", COLORS["blue"]))
    for (name, points), (marker, color) in zip(counted.items(), looks, strict=True):
        axes.plot(list(points), list(points.values()), marker, color=color, label=name)
    counts = sorted({count for points in counted.values() for count in points})
    fine = [counts[0] + index * (counts[-1] - counts[0]) / 100 for index in range(101)]
    axes.plot(fine, [n - 1 for n in fine], color=looks[0][1], lw=1, label="n - 1")
    axes.plot(fine, [2 * (n - 1) / n for n in fine], color=looks[1][1], lw=1, label="2(n-1)/n")
    axes.set(
        xlabel="ranks (n)",
        ylabel="bytes sent / tensor size",
        xticks=counts,
        ylim=(0, None),
    )
    axes.legend()
    title(axes, "A ring has no busiest rank", "bytes counted on the rank that sends the most")
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{most:.2f} with {ranks} ranks" for ranks, most in points.items())
        for name, points in counted.items()
    )
    show(fig, f"Bytes sent by the busiest rank, as multiples of the tensor's size. {summary}.")


def ring(held: Sequence[Sequence[int]], sent: Sequence[int], message: str) -> None:
    """Draw each rank's chunks after one step of a ring, and the transfers in that step.

    ``held[rank][chunk]`` is a value as described above; ``sent[rank]`` is the chunk that the rank
    has just sent to the next one. Before the first step, ``sent`` is empty.
    """
    ranks = len(held)
    fig, axes = figure(width=6.5, height=1.2 + 0.5 * ranks)
    # Longer numbers don't fit next to the arrows; the colors convey the same information.
    for rank, numbers in enumerate(held):
        axes.text(-0.15, rank, f"rank {rank}", ha="right", va="center", in_layout=False)
        _row(axes, 0, rank, numbers, with_text=ranks <= 5)
    _arrows(axes, sent, ranks)
    for chunk in range(ranks):
        axes.text(chunk + 0.46, -0.85, f"chunk {chunk}", ha="center", va="center", in_layout=False)
    axes.set(xlim=(-0.9, ranks), ylim=(ranks - 0.3, -1.1))
    axes.axis("off")
    title(axes, message, "computed: a cell's colors show the ranks whose values it contains")
    summary = "; ".join(f"rank {rank} holds {list(numbers)}" for rank, numbers in enumerate(held))
    moves = ", ".join(f"chunk {chunk} from rank {rank}" for rank, chunk in enumerate(sent))
    show(
        fig, f"A grid of chunks by rank, {message}: {summary}. Just sent: {moves or 'nothing yet'}."
    )


def _numbers(tensor: torch.Tensor | None) -> list[int]:
    return [] if tensor is None else [int(number) for number in tensor.flatten().tolist()]


# Drawn under a number that covers several bands: their edges would cut through its digits.
_PLATE = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def _row(
    axes: Axes,
    left: float,
    rank: float,
    numbers: Sequence[int],
    *,
    with_text: bool = True,
    faded: bool = False,
) -> None:
    """Draw cells side by side, each with one band for every rank that contributed to its value."""
    width, height = 0.92, 0.8
    bands, colors = [], []
    for index, number in enumerate(numbers):
        ranks_held = origins(number)
        for place, origin in enumerate(ranks_held):
            top = rank - height / 2 + place * height / len(ranks_held)
            bottom, right = top + height / len(ranks_held), left + index + width
            bands.append(
                [(left + index, top), (right, top), (right, bottom), (left + index, bottom)]
            )
            colors.append(RANK_COLORS[origin])
        if with_text:
            axes.text(
                left + index + width / 2,
                rank,
                str(number),
                ha="center",
                va="center",
                fontsize=9,
                color="#777777" if faded else "black",
                bbox=_PLATE if len(ranks_held) > 1 and not faded else None,
                in_layout=False,  # inside its cell; measuring each text would take most of the time
            )
    alpha = 0.25 if faded else 1
    axes.add_collection(PolyCollection(bands, facecolor=colors, edgecolor="none", alpha=alpha))


def _arrows(axes: Axes, sent: Sequence[int], ranks: int) -> None:
    """Draw arrows down from each rank to the next; the last rank's wraps around to the top."""
    if not sent:
        return
    columns = [chunk + 0.75 for chunk in (*sent, sent[-1])]
    starts = [*range(ranks), -0.65]
    ends = [*range(1, ranks), ranks - 0.35, 0]
    axes.vlines(columns, starts, ends, color=COLORS["black"], lw=1.5, clip_on=False)
    axes.plot(columns, ends, "v", color=COLORS["black"], ms=5, clip_on=False)


def hands(parts: Sequence[Sequence[int]]) -> None:
    """Draw the samples that a sampler assigned to each rank, with repeated ones highlighted.

    ``parts`` has one list of sample indices per rank. A sample counts as repeated if it also
    appears farther left, or higher in the same column.
    """
    longest = max((len(part) for part in parts), default=0)
    fig, axes = figure(width=1.6 + 0.8 * longest, height=0.9 + 0.5 * len(parts))
    seen: set[int] = set()
    for turn in range(longest):
        for rank, part in enumerate(parts):
            if turn < len(part):
                again = part[turn] in seen
                seen.add(part[turn])
                color = COLORS["vermilion"] if again else COLORS["sky"]
                axes.add_patch(Rectangle((turn - 0.45, rank - 0.4), 0.9, 0.8, color=color))
                text = f"{part[turn]} again" if again else str(part[turn])
                axes.text(turn, rank, text, ha="center", va="center", fontsize=10)
    axes.set(xlim=(-0.6, longest - 0.4), ylim=(len(parts) - 0.5, -0.5))
    axes.set_xticks(range(longest), [str(turn + 1) for turn in range(longest)])
    axes.set_yticks(range(len(parts)), [f"rank {rank}" for rank in range(len(parts))])
    axes.set_xlabel("turn")
    axes.grid(visible=False)
    title(axes, "Who gets which sample", "assigned by DistributedSampler")
    summary = "; ".join(f"rank {rank} gets {list(part)}" for rank, part in enumerate(parts))
    show(fig, f"Cells with sample indices, a row for each rank: {summary}.")


def halves(sent: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Draw, in a row per method, which halves of an all-reduce it sends in each phase of a step."""
    colors = {"reduce-scatter": COLORS["vermilion"], "all-gather": COLORS["sky"]}
    phases = list(next(iter(sent.values())))
    columns = {phase: max(1, *(len(way[phase]) for way in sent.values())) for phase in phases}
    fig, axes = figure(width=7.5, height=0.5 + 0.9 * len(sent))
    for row, (name, way) in enumerate(sent.items()):
        start = 0
        axes.text(-0.15, row + 0.22, name, ha="right", va="center", fontweight="bold")
        for phase in phases:
            width = columns[phase]
            axes.add_patch(Rectangle((start, row + 0.42), width - 0.06, 0.36, color="#DDDDDD"))
            middle = (start + (width - 0.06) / 2, row + 0.6)
            axes.text(*middle, phase, ha="center", va="center", fontsize=9, color="#333333")
            for column, half in enumerate(way[phase], start):
                axes.add_patch(Rectangle((column, row), 0.94, 0.38, color=colors[half]))
                axes.text(column + 0.47, row + 0.19, half, ha="center", va="center", fontsize=9)
            start += width
    counts = {name: sum(map(len, way.values())) for name, way in sent.items()}
    axes.set(xlim=(-1.2, sum(columns.values()) + 0.1), ylim=(len(sent) - 0.15, -0.05))
    axes.axis("off")
    words = ("no halves", "one half", "two halves", "three halves")
    message = ", ".join(f"{name} sends {words[count]}" for name, count in counts.items())
    title(
        axes,
        message,
        "amounts, not times: each box is half of an all-reduce's bytes; gray: computation",
    )
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{' and '.join(way[p]) or 'nothing'} in {p}" for p in phases)
        for name, way in sent.items()
    )
    show(fig, f"Rows of boxes, one for each half of an all-reduce sent in a step. {summary}.")


def bytes_sent(runs: dict[str, Sequence[int]]) -> None:
    """Plot the bytes a rank has passed to all-reduce after each micro-batch, one line per run."""
    fig, axes = figure(height=2.8)
    markers = "osD^"
    for index, (name, counts) in enumerate(runs.items()):
        turns = range(1, len(counts) + 1)
        (line,) = axes.plot(turns, [c / 1024 for c in counts], marker=markers[index % 4])
        end, text = (len(counts), counts[-1] / 1024), f"{name}: {format_bytes(counts[-1])}"
        text_near(axes, text, end, (8, 0), va="center", color=line.get_color())
        axes.set_xticks(turns)
        axes.set_xlim(0.8, len(counts) * 1.5)
    axes.set(xlabel="micro-batch", ylabel="KiB passed to all-reduce")
    axes.set_ylim(bottom=-2)
    title(axes, "Accumulating with no_sync sends once", "counted by a communication hook")
    summary = "; ".join(
        f"{name} {', '.join(format_bytes(count) for count in counts)}"
        for name, counts in runs.items()
    )
    show(fig, f"Line chart of the bytes passed to all-reduce after each micro-batch: {summary}.")


def interrupted(
    whole: Sequence[tuple[int, float]],
    resumed: Sequence[tuple[int, float]],
    stopped_after: int,
    lost: float,
) -> None:
    """Plot accuracy after each epoch for an uninterrupted run and one that was stopped and resumed.

    Each run is a list of (number of ranks, accuracy between 0 and 1), one per epoch. The second one
    was stopped ``lost`` epochs after ``stopped_after``, the last epoch in its checkpoint.
    """
    fig, axes = figure(height=2.8)
    percent = [[100 * right for _, right in run] for run in (whole, resumed)]
    epochs = range(1, len(whole) + 1)
    axes.plot(
        epochs, percent[0], color=COLORS["gray"], linewidth=6, alpha=0.5, label="uninterrupted"
    )
    before, after = range(stopped_after), range(stopped_after - 1, len(resumed))
    for part, look, name in ((before, "o-", "until the stop"), (after, "s-", "resumed")):
        numbers, markers = [e + 1 for e in part], slice(0 if part is before else 1, None)
        axes.plot(numbers, [percent[1][e] for e in part], look, markevery=markers, label=name)
    end = stopped_after + lost
    axes.axvspan(stopped_after, end, color=COLORS["vermilion"], alpha=0.2, linewidth=0)
    axes.axvline(end, color=COLORS["vermilion"], linewidth=1, linestyle="--")
    axes.text(
        end + 0.04, min(percent[0]), "killed here; the shaded\npart is done twice", fontsize=9
    )
    axes.set(xlabel="finished epochs", ylabel="held-out accuracy (%)", xticks=epochs)
    axes.legend(loc="lower right")
    title(axes, "Killed mid-epoch and resumed: the same curve", "measured after each epoch")
    show(
        fig,
        f"Accuracy by epoch. The uninterrupted run ends at {percent[0][-1]:.1f}%. The other run "
        f"has {percent[1][stopped_after - 1]:.1f}% at its checkpoint after {stopped_after} epochs, is "
        f"killed {lost:.1f} epochs later, is resumed, and ends at {percent[1][-1]:.1f}%.",
    )


def latency_and_bandwidth(measured: Mapping[int, float], expected: Mapping[int, float]) -> None:
    """Plot an all-reduce's time by size: measured points, and the fit of latency and bandwidth."""
    fig, axes = figure(width=7.5, height=3.4)
    sizes = list(measured)
    axes.plot(
        sizes, list(expected.values()), color=COLORS["orange"], label="latency + bytes / bandwidth"
    )
    axes.plot(sizes, list(measured.values()), "o", color=COLORS["blue"], label="measured")
    axes.set(xscale="log", yscale="log", xlabel="bytes per rank", ylabel="time (s)")
    axes.set_xticks(sizes[::2], [format_bytes(size) for size in sizes[::2]])
    axes.minorticks_off()
    axes.legend(loc="upper left", fontsize=9)
    title(axes, "Latency first, then bandwidth", "all-reduce between two processes, measured here")
    summary = ", ".join(
        f"{format_bytes(size)} {format_seconds(measured[size])}" for size in sizes[::2]
    )
    show(fig, f"An all-reduce's time by number of bytes, flat at first and then rising: {summary}.")
