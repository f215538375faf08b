"""Who holds what before and after a collective, and a ring all-reduce step by step.

The lesson starts rank r with small numbers times 10**r. So a number tells which ranks went into
it: 110 holds something of ranks 1 and 2. The colours of a cell are read off its number.
"""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from helpers.plots.style import COLOURS, figure, show, title

RANK_COLOURS = tuple(
    COLOURS[name]
    # Light ones first: the numbers on them are black.
    for name in ("sky", "orange", "green", "vermilion", "purple", "yellow", "grey", "blue")
)
_GAP = 2.2

Held = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


def origins(number: int) -> list[int]:
    """The ranks whose numbers went into a sum: the places of its digits that are not 0.

    Raises ValueError for a negative number, and for one with more digits than there are colours.
    """
    digits = str(number)
    if not digits.isdecimal() or len(digits) > len(RANK_COLOURS):
        raise ValueError(
            f"{number} is no number of this lesson: from 0, with up to {len(RANK_COLOURS)} digits, "
            "one for each rank"
        )
    return [rank for rank, digit in enumerate(reversed(digits)) if digit != "0"]


def before_and_after(held: dict[str, Held]) -> None:
    """One row of cells a rank, before and after each collective.

    ``held`` maps a collective's name to the ``(before, after)`` of each rank, whole numbers as
    described above; ``after`` is None on a rank that receives nothing.
    """
    ranks = len(next(iter(held.values())))
    before_cells = max(len(before) for runs in held.values() for before, _ in runs)
    after_cells = max(len(_numbers(after)) for runs in held.values() for _, after in runs)
    start = before_cells + _GAP
    made, panels = figure(
        len(held), 1, width=8.0, height=0.4 + len(held) * (0.75 + 0.28 * ranks), squeeze=False
    )
    for axes, (name, runs) in zip(panels[:, 0], held.items(), strict=True):
        for rank, (before, after) in enumerate(runs):
            axes.text(-0.25, rank, f"rank {rank}", ha="right", va="center")
            _row(axes, 0, rank, _numbers(before))
            _row(axes, start, rank, _numbers(after))
            if after is None:
                axes.text(start, rank, "nothing", va="center", color="#666666", style="italic")
        axes.annotate(
            "",
            xy=(start - 0.4, (ranks - 1) / 2),
            xytext=(before_cells + 0.4, (ranks - 1) / 2),
            arrowprops={"arrowstyle": "->", "color": "#444444", "lw": 1.5},
        )
        axes.text(0, -0.72, "before", color="#666666", va="center")
        axes.text(start, -0.72, "after", color="#666666", va="center")
        # The same scale in every figure of the lesson: a cell is a cell.
        axes.set(xlim=(-1.4, max(start + after_cells, 15)), ylim=(ranks - 0.4, -1.1))
        axes.axis("off")
        title(axes, name, f"values returned by {ranks} real ranks")
    told = "; ".join(
        f"{name} leaves "
        + ", ".join(
            f"rank {rank} with {_numbers(after) or 'nothing'}"
            for rank, (_, after) in enumerate(runs)
        )
        for name, runs in held.items()
    )
    starts = ", ".join(str(_numbers(before)) for before, _ in next(iter(held.values())))
    show(
        made, f"Rows of cells, one a rank, before and after. The ranks start with {starts}; {told}."
    )


def busiest_rank(counted: dict[str, dict[int, float]]) -> None:
    """Bytes sent by the busiest rank, as multiples of the tensor's bytes, over the ranks.

    ``counted`` maps the name of an algorithm to {number of ranks: multiple}.
    """
    made, axes = figure(width=6.5, height=3.2)
    looks = (("o", COLOURS["vermilion"]), ("s", COLOURS["blue"]))
    for (name, points), (marker, colour) in zip(counted.items(), looks, strict=True):
        axes.plot(list(points), list(points.values()), marker, color=colour, label=name)
    counts = sorted({count for points in counted.values() for count in points})
    fine = [counts[0] + index * (counts[-1] - counts[0]) / 100 for index in range(101)]
    axes.plot(fine, [n - 1 for n in fine], color=looks[0][1], lw=1, label="n - 1")
    axes.plot(fine, [2 * (n - 1) / n for n in fine], color=looks[1][1], lw=1, label="2(n-1)/n")
    axes.set(
        xlabel="ranks (n)",
        ylabel="bytes sent / bytes of the tensor",
        xticks=counts,
        ylim=(0, None),
    )
    axes.legend()
    title(axes, "A ring has no busiest rank", "bytes counted on the rank that sends most")
    told = "; ".join(
        f"{name}: " + ", ".join(f"{most:.2f} with {ranks} ranks" for ranks, most in points.items())
        for name, points in counted.items()
    )
    show(made, f"Points of bytes sent by the busiest rank, in multiples of the tensor. {told}.")


def ring(held: Sequence[Sequence[int]], sent: Sequence[int], message: str) -> None:
    """The chunks of each rank after one step of a ring, and the moves of that step.

    ``held[rank][chunk]`` is a number as described above; ``sent[rank]`` the chunk that the rank
    has just sent to the next one, or no entries before the first step.
    """
    ranks = len(held)
    made, axes = figure(width=6.5, height=1.2 + 0.5 * ranks)
    # More digits do not fit beside the arrows; the colours say the same.
    for rank, numbers in enumerate(held):
        axes.text(-0.15, rank, f"rank {rank}", ha="right", va="center", in_layout=False)
        _row(axes, 0, rank, numbers, with_text=ranks <= 5)
    _arrows(axes, sent, ranks)
    for chunk in range(ranks):
        axes.text(chunk + 0.46, -0.85, f"chunk {chunk}", ha="center", va="center", in_layout=False)
    axes.set(xlim=(-0.9, ranks), ylim=(ranks - 0.3, -1.1))
    axes.axis("off")
    title(axes, message, "computed: every colour in a cell is a rank whose numbers it holds")
    told = "; ".join(f"rank {rank} holds {list(numbers)}" for rank, numbers in enumerate(held))
    moves = ", ".join(f"chunk {chunk} from rank {rank}" for rank, chunk in enumerate(sent))
    show(made, f"A grid of chunks by rank, {message}: {told}. Just sent: {moves or 'nothing yet'}.")


def _numbers(tensor: torch.Tensor | None) -> list[int]:
    return [] if tensor is None else [int(number) for number in tensor.flatten().tolist()]


def _row(
    axes: Axes, left: float, rank: int, numbers: Sequence[int], *, with_text: bool = True
) -> None:
    """Cells side by side; each is cut into one band for every rank that its number holds."""
    width, height = 0.92, 0.8
    bands, colours = [], []
    for index, number in enumerate(numbers):
        found = origins(number)
        for place, origin in enumerate(found):
            top = rank - height / 2 + place * height / len(found)
            bottom, right = top + height / len(found), left + index + width
            bands.append(
                [(left + index, top), (right, top), (right, bottom), (left + index, bottom)]
            )
            colours.append(RANK_COLOURS[origin])
        if with_text:
            axes.text(
                left + index + width / 2,
                rank,
                str(number),
                ha="center",
                va="center",
                fontsize=9,
                in_layout=False,  # inside its cell; measuring each would take most of the time
            )
    axes.add_collection(PolyCollection(bands, facecolor=colours, edgecolor="none"))


def _arrows(axes: Axes, sent: Sequence[int], ranks: int) -> None:
    """Down from each rank to the next; the last one's leaves below and comes in from above."""
    if not sent:
        return
    columns = [chunk + 0.75 for chunk in (*sent, sent[-1])]
    starts = [*range(ranks), -0.65]
    ends = [*range(1, ranks), ranks - 0.35, 0]
    axes.vlines(columns, starts, ends, color=COLOURS["black"], lw=1.5, clip_on=False)
    axes.plot(columns, ends, "v", color=COLOURS["black"], ms=5, clip_on=False)
