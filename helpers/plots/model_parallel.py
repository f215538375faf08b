"""Which GPU works when, for a network cut into stages; times of one step, repeated."""

import statistics
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from helpers.plots.style import COLOURS, figure, title
from helpers.vgpu.timing.trace import Timeline, TraceEvent


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


def stages_over_time(timeline: Timeline) -> None:
    """One row a GPU: forward, backward, copies and the rest, in virtual time."""
    colours = {
        "forward": COLOURS["blue"],
        "backward": COLOURS["orange"],
        "copy": COLOURS["vermilion"],
        "loss, update": COLOURS["green"],
    }
    made, axes = figure(width=8.5, height=1.6 + 0.5 * len(timeline.devices))
    for row, device in enumerate(timeline.devices):
        for kind, colour in colours.items():
            spans = [
                (event.start_s, event.duration_s)
                for event in timeline.of(device)
                if _kind(event) == kind
            ]
            label = kind if row == 0 else None
            axes.broken_barh(spans, (row - 0.35, 0.7), color=colour, label=label, lw=0.4)
    axes.set_yticks(range(len(timeline.devices)), [str(device) for device in timeline.devices])
    axes.set_ylim(len(timeline.devices) - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan_s)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("virtual time (s)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    title(axes, "One GPU works, the other waits", f"virtual time, {timeline.gpu}")
    plt.show()
    plt.close(made)


def _kind(event: TraceEvent) -> str:
    if event.kind == "copy":
        return "copy"
    if event.backward:
        return "backward"
    return "forward" if event.module else "loss, update"
