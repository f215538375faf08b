"""Times of one step, repeated."""

import statistics
from collections.abc import Mapping, Sequence

from helpers.plots.style import COLOURS, figure, show, title
from vgpu.units import format_seconds


def repeated_times(times_s: Mapping[str, Sequence[float]]) -> None:
    """One row a name: every repeat as a dot, the median and the quartiles as a bar.

    ``times_s`` maps a name to seconds, two or more repeats of one step.
    """
    made, axes = figure(width=7.5, height=1.3 + 0.6 * len(times_s))
    told = []
    for row, (name, repeats_s) in enumerate(times_s.items()):
        repeats_ms = [1e3 * time_s for time_s in repeats_s]
        axes.plot(repeats_ms, [row - 0.22] * len(repeats_ms), "o", color=COLOURS["sky"], ms=5)
        low, middle, high = statistics.quantiles(repeats_ms)
        axes.plot([low, high], [row + 0.12] * 2, color=COLOURS["vermilion"], linewidth=4)
        axes.plot([middle], [row + 0.12], "s", color=COLOURS["vermilion"], ms=8)
        quartiles = f"{format_seconds(low / 1e3)} to {format_seconds(high / 1e3)}"
        told.append(f"{name}: median {format_seconds(middle / 1e3)}, quartiles {quartiles}")
    axes.set_yticks(range(len(times_s)), list(times_s))
    axes.set_ylim(len(times_s) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("one step (ms)")
    title(axes, "One step, repeated", "measured on this machine; square: median, bar: quartiles")
    show(made, f"Every repeat as a dot. {'; '.join(told)}.")
