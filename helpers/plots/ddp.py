"""Figures of the lesson on DistributedDataParallel."""

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from helpers.plots.style import COLOURS, figure, show, title
from vgpu.units import format_bytes


def hands(parts: Sequence[Sequence[int]]) -> None:
    """Which samples each rank was dealt, by a sampler; samples dealt before are marked.

    ``parts`` holds one list of sample numbers for each rank. A sample counts as dealt again where
    the same one stands further left, or higher in the same column.
    """
    longest = max((len(part) for part in parts), default=0)
    made, axes = figure(width=1.6 + 0.8 * longest, height=0.9 + 0.5 * len(parts))
    seen: set[int] = set()
    for turn in range(longest):
        for rank, part in enumerate(parts):
            if turn < len(part):
                again = part[turn] in seen
                seen.add(part[turn])
                colour = COLOURS["vermilion"] if again else COLOURS["sky"]
                axes.add_patch(Rectangle((turn - 0.45, rank - 0.4), 0.9, 0.8, color=colour))
                text = f"{part[turn]} again" if again else str(part[turn])
                axes.text(turn, rank, text, ha="center", va="center", fontsize=10)
    axes.set(xlim=(-0.6, longest - 0.4), ylim=(len(parts) - 0.5, -0.5))
    axes.set_xticks(range(longest), [str(turn + 1) for turn in range(longest)])
    axes.set_yticks(range(len(parts)), [f"rank {rank}" for rank in range(len(parts))])
    axes.set_xlabel("turn")
    axes.grid(visible=False)
    title(axes, "Who gets which sample", "counted")
    told = "; ".join(f"rank {rank} is dealt {list(part)}" for rank, part in enumerate(parts))
    show(made, f"Cells with sample numbers, a row for each rank: {told}.")


def bytes_sent(runs: dict[str, Sequence[int]]) -> None:
    """Bytes that a rank has handed to all-reduce after each micro-batch, one line a run."""
    made, axes = figure(height=2.8)
    markers = "osD^"
    for index, (name, counts) in enumerate(runs.items()):
        turns = range(1, len(counts) + 1)
        (line,) = axes.plot(turns, [c / 1024 for c in counts], marker=markers[index % 4])
        axes.annotate(
            f"{name}: {format_bytes(counts[-1])}",
            (len(counts), counts[-1] / 1024),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
        )
        axes.set_xticks(turns)
        axes.set_xlim(0.8, len(counts) * 1.5)
    axes.set_xlabel("micro-batch")
    axes.set_ylabel("KiB handed over")
    axes.set_ylim(bottom=-2)
    title(axes, "Accumulating with no_sync sends once", "counted by a communication hook")
    told = "; ".join(
        f"{name} {', '.join(format_bytes(count) for count in counts)}"
        for name, counts in runs.items()
    )
    show(made, f"Lines of bytes handed over after each micro-batch: {told}.")


def interrupted(
    whole: Sequence[tuple[int, float]], resumed: Sequence[tuple[int, float]], stopped_after: int
) -> None:
    """Accuracy after each epoch, of an undisturbed run and of one that was stopped and resumed.

    Each run is a list of (number of ranks, accuracy between 0 and 1), one an epoch.
    """
    made, axes = figure(height=2.8)
    percent = [[100 * right for _, right in run] for run in (whole, resumed)]
    axes.plot(percent[0], color=COLOURS["grey"], linewidth=6, alpha=0.5, label="undisturbed")
    before, after = range(stopped_after), range(stopped_after, len(resumed))
    for epochs, marker, name in ((before, "o", "two hosts"), (after, "s", "resumed in a cell")):
        axes.plot(epochs, [percent[1][e] for e in epochs], marker=marker, label=name)
    axes.axvline(stopped_after - 0.5, color=COLOURS["black"], linewidth=1, linestyle="--")
    axes.text(stopped_after - 0.45, min(percent[0]), "host 1 lost", va="bottom")
    axes.set_xlabel("epoch")
    axes.set_ylabel("held-out digits right (%)")
    axes.legend(loc="lower right")
    title(axes, "Lost, resumed, and on the same line", "measured after each epoch")
    show(
        made,
        f"Accuracy by epoch. The undisturbed run ends at {percent[0][-1]:.1f} %. The other one loses "
        f"a host after {stopped_after} epochs, at {percent[1][stopped_after - 1]:.1f} %, is resumed, "
        f"and ends at {percent[1][-1]:.1f} %.",
    )
