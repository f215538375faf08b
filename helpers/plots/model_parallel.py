"""Times of the same step, repeated."""

import statistics
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from helpers.plots.style import COLOURS, figure, title


def repeated_times(times_s: Mapping[str, Sequence[float]]) -> None:
    """One row a name: every repeat as a dot, the mean with one standard deviation to each side.

    ``times_s`` maps a name to seconds, two or more repeats of one step.
    """
    made, axes = figure(width=7.5, height=1.3 + 0.6 * len(times_s))
    for row, repeats_s in enumerate(times_s.values()):
        repeats_ms = [1e3 * time_s for time_s in repeats_s]
        axes.plot(repeats_ms, [row - 0.22] * len(repeats_ms), "o", color=COLOURS["sky"], ms=5)
        axes.errorbar(
            statistics.mean(repeats_ms),
            row + 0.1,
            xerr=statistics.stdev(repeats_ms),
            fmt="s",
            color=COLOURS["vermilion"],
            capsize=6,
            ms=7,
        )
    axes.set_yticks(range(len(times_s)), list(times_s))
    axes.set_ylim(len(times_s) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("one step (ms)")
    message = "Repeats of one step differ: give the mean and the standard deviation"
    title(axes, message, "measured on this machine; dots: repeats, square: mean ± deviation")
    plt.show()
    plt.close(made)
