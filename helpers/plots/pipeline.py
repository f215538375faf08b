"""Pipelines by split size, and data parallelism by number of GPUs: figures of virtual times."""

from collections.abc import Mapping, Sequence
from typing import Any

from helpers.plots.style import COLOURS, figure, headline, show, title
from vgpu.time.timeline import Timeline, covered_s


def split_sizes(
    predicted_s: Mapping[int, float], published_s: Mapping[int, float], one_gpu_s: float
) -> None:
    """Seconds by split size: a predicted curve, and the published points.

    The largest size of ``predicted_s`` is the whole batch. one_gpu_s: the published time of one
    GPU, a level.
    """
    sizes = sorted(predicted_s)
    made, axes = figure(width=8, height=3.6)
    axes.plot(sizes, [predicted_s[size] for size in sizes], "o-", color=COLOURS["blue"], ms=5)
    axes.plot(
        list(published_s),
        list(published_s.values()),
        "D",
        color=COLOURS["vermilion"],
        ms=8,
        mfc="none",
        mew=2,
    )
    axes.axhline(one_gpu_s, color=COLOURS["grey"], linestyle="--", linewidth=1.5)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * max(*predicted_s.values(), *published_s.values()))
    axes.set_xlabel("split size (images in a piece)")
    axes.set_ylabel("3 batches (s)")
    axes.legend(
        ["two GPUs, predicted", "two GPUs, published", "one GPU, published"],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        fontsize=9,
    )
    title(axes, "Small pieces and large ones are slow", "virtual time, K80; published: measured")
    best = min(sizes, key=lambda size: predicted_s[size])
    told = ", ".join(f"{size}: {predicted_s[size]:.2f}" for size in sizes)
    show(
        made,
        f"Predicted seconds by split size, a valley with its floor at {best}: {told}. Published: "
        f"{', '.join(f'{size}: {time_s}' for size, time_s in published_s.items())}; one GPU {one_gpu_s}.",
    )


def parts_of_time(timelines: Mapping[int, Timeline]) -> None:
    """For each split size and each of two GPUs: one batch's seconds of computing, copying, idling."""
    sizes = sorted(timelines)
    devices = timelines[sizes[0]].devices
    made, panels = figure(1, len(devices), width=9, height=3.4, sharey=True)
    for axes, device in zip(panels, devices, strict=True):
        parts = [_parts(timelines[size], device) for size in sizes]
        bottom = [0.0] * len(sizes)
        for name, colour in (("computes", "blue"), ("copies", "vermilion"), ("idles", "grey")):
            heights = [part[name] for part in parts]
            axes.bar(range(len(sizes)), heights, bottom=bottom, color=COLOURS[colour], label=name)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlabel("split size (images in a piece)")
        axes.set_title(str(device), fontsize=10)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("one batch (s)")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    gpu = timelines[sizes[0]].gpu
    headline(made, "Large pieces idle, small pieces compute longer", f"virtual time, {gpu}")
    ends = []
    for size in (sizes[0], sizes[-1]):
        parts = [_parts(timelines[size], device) for device in devices]
        ends.append(
            f"pieces of {size}: computes {_both(parts, 'computes')} s, "
            f"idles {_both(parts, 'idles')} s"
        )
    show(
        made,
        "Bars by split size for each GPU: seconds of one batch in which it computes, copies and "
        f"idles. At the ends, {'; '.join(ends)}.",
    )


def _parts(timeline: Timeline, device: object) -> dict[str, float]:
    events = timeline.of(str(device))
    busy_s = timeline.busy_s(str(device))
    active_s = covered_s(events)
    return {
        "computes": busy_s,
        "copies": active_s - busy_s,  # those beside a kernel take no time of their own
        "idles": timeline.makespan_s - active_s,
    }


def _both(parts: Sequence[Mapping[str, float]], name: str) -> str:
    return " and ".join(f"{part[name]:.2f}" for part in parts)


def data_parallel_against_ddp(
    times_s: Mapping[int, tuple[float, float]], gpu: str, batch_size: int
) -> None:
    """One iteration by number of GPUs; ``times_s[count]`` is (DataParallel's seconds, DDP's)."""
    counts = sorted(times_s)
    made, (left, right) = figure(1, 2, width=9, height=3.2)
    for way, (name, marker, colour) in enumerate(
        (("DataParallel", "s-", "orange"), ("DDP", "o-", "blue"))
    ):
        each_s = [times_s[count][way] for count in counts]
        look: Any = {"color": COLOURS[colour], "label": name}
        left.plot(counts, [1e3 * time_s for time_s in each_s], marker, **look)
        right.plot(counts, [each_s[0] / time_s for time_s in each_s], marker, **look)
    right.plot(counts, [n / counts[0] for n in counts], "--", color=COLOURS["grey"], label="ideal")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_ylim(0, None)
        axes.set_xlabel("GPUs")
    left.set_ylabel("one iteration (ms)")
    right.set_ylabel("times as fast")
    right.legend(fontsize=9)
    headline(made, f"The same {batch_size} images on more GPUs", f"virtual time, {gpu}")
    told = "; ".join(
        f"{count} GPU{'s' if count > 1 else ''}: {1e3 * times_s[count][0]:.0f} and {1e3 * times_s[count][1]:.0f} ms"
        for count in counts
    )
    show(made, f"Two curves of one iteration's time, DataParallel and DDP. {told}.")
