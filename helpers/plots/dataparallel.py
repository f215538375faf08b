"""Figures for DataParallel: batch shares, parts of a call, bytes per GPU, times against DDP's."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, product
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.patheffects import withStroke

from helpers.plots.memory import CAUSE_COLORS, MIB
from helpers.plots.style import (
    COLORS,
    RANK_COLORS,
    figure,
    headline,
    legend_beside,
    log2_ticks,
    show,
    stacked_bars,
    text_near,
    title,
)
from vgpu.profiling.memory import OTHER, Snapshot
from vgpu.units import format_bytes


def shares(runs: dict[int, list[tuple[torch.device, int]]]) -> None:
    """Plot the samples that each GPU received, one panel per run.

    ``runs`` maps a number of GPUs to ``(device, samples)`` pairs recorded by a hook. GPUs that
    received nothing are marked with 0.
    """
    fig, panels = figure(1, len(runs), width=8.5, height=2.9, sharey=True, squeeze=False)
    texts = []
    for axes, (count, received) in zip(panels[0], runs.items(), strict=True):
        samples = [0] * count
        for device, size in received:
            samples[device.index] += size
        bars = axes.bar(range(count), samples, color=COLORS["blue"], width=0.7)
        axes.bar_label(bars, fontsize=8 if count > 4 else 9, padding=2)
        axes.set_xticks(range(count))
        axes.set(xlim=(-0.8, max(count, 3) - 0.2), xlabel=f"GPU (of {count})")
        texts.append(f"With {count} GPU{'s' if count > 1 else ''}: {', '.join(map(str, samples))}.")
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("samples received")
    headline(fig, "Shares are rounded up: the last GPU gets what's left", "counted by a hook")
    show(fig, f"Bar chart of samples per GPU. {' '.join(texts)}")


def where_layers_run(ways: Mapping[str, Collection[tuple[str, str, int]]]) -> None:
    """Draw the samples each layer sees: a panel per strategy, a row per layer, a column per GPU.

    ``ways`` maps a strategy's name to the (GPU, layer, samples) tuples recorded by hooks.
    """
    fig, panels = figure(1, len(ways), width=8.5, height=2.1, sharey=True, squeeze=False)
    texts = []
    for axes, (way, seen) in zip(panels[0], ways.items(), strict=True):
        gpus = sorted({gpu for gpu, *_ in seen})
        layers = sorted({layer for _, layer, _ in seen})
        for gpu, layer, samples in seen:
            x, y = gpus.index(gpu), layers.index(layer)
            axes.add_patch(Rectangle((x - 0.45, y - 0.4), 0.9, 0.8, color=COLORS["sky"]))
            axes.text(x, y, f"{samples} samples", ha="center", va="center")
        axes.set(xlim=(-0.6, len(gpus) - 0.4), ylim=(len(layers) - 0.4, -0.6))
        axes.set_xticks(range(len(gpus)), gpus)
        axes.set_yticks(range(len(layers)), layers)
        axes.grid(visible=False)
        axes.set_title(way, fontweight="bold")
        where = (f"{layer} on {gpu} sees {samples} samples" for gpu, layer, samples in sorted(seen))
        texts.append(f"{way}: {', '.join(where)}.")
    show(fig, f"A box marks each GPU where a layer runs. {' '.join(texts)}")


def share_bars(sizes: Sequence[int]) -> None:
    """Plot each GPU's share of a batch as a bar; idle GPUs are marked."""
    fig, axes = figure(width=7.5, height=2.6)
    bars = axes.bar(range(len(sizes)), sizes, color=COLORS["blue"], width=0.7)
    axes.bar_label(bars, [str(size) if size else "idle" for size in sizes], padding=2)
    axes.set_xticks(range(len(sizes)), [f"GPU {index}" for index in range(len(sizes))])
    axes.set(ylabel="samples", ylim=(0, max(sizes) * 1.2))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="x", visible=False)
    title(axes, f"A batch of {sum(sizes)} on {len(sizes)} GPUs", "counted from PyTorch's scatter")
    each = ", ".join(f"GPU {index} {size or 'idle'}" for index, size in enumerate(sizes))
    show(fig, f"Bar chart of samples per GPU, for a batch of {sum(sizes)}: {each}.")


def idle_gpus(idle: Mapping[int, int], gpu_count: int) -> None:
    """Plot how many of ``gpu_count`` GPUs are idle, by batch size; mark the last size with idle GPUs."""
    fig, axes = figure(width=8, height=2.6)
    axes.bar(list(idle), list(idle.values()), 0.8, color=COLORS["orange"])
    last = max((size for size, count in idle.items() if count), default=None)
    if last is not None:
        down: Any = {"arrowstyle": "->", "color": "#555555"}
        look: Any = {"ha": "center", "fontsize": 9, "arrowprops": down}
        text_near(axes, f"a batch of {last}", (last, idle[last]), (0, 16), **look)
    axes.set_xticks(range(gpu_count, max(idle) + 1, gpu_count))
    axes.set(xlabel="batch size", ylabel=f"idle GPUs (of {gpu_count})", ylim=(0, gpu_count))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="x", visible=False)
    title(axes, f"A multiple of {gpu_count} keeps every GPU busy", "counted from PyTorch's scatter")
    some = ", ".join(f"{count} at {size}" for size, count in idle.items() if count)
    show(fig, f"Bar chart of idle GPUs, out of {gpu_count}, by batch size: {some}; otherwise 0.")


def replica_sizes(records: dict[int, list[list[tuple[torch.device, int]]]]) -> None:
    """Plot what each replica received: a panel per number of GPUs, with one stacked bar per batch.

    ``records[gpu_count][batch]`` lists ``(device, samples)`` for each replica that ran. Successive
    batches that were split alike share a bar.
    """
    fig, panels = figure(1, len(records), width=8.5, height=3.1, sharey=True, squeeze=False)
    texts = []
    for axes, (count, batches) in zip(panels[0], records.items(), strict=True):
        splits = [
            [size for _, size in sorted(batch, key=lambda r: r[0].index)] for batch in batches
        ]
        names = []
        for index, (sizes, alike) in enumerate(groupby(enumerate(splits, 1), lambda pair: pair[1])):
            numbers = [number for number, _ in alike]
            names.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}")
            _stack_shares(axes, index, sizes, count - len(sizes))
        axes.set_xticks(range(len(names)), names)
        axes.set(
            xlabel=f"batch ({count} GPU{'s' if count > 1 else ''})", xlim=(-0.7, len(names) - 0.3)
        )
        cuts = ("+".join(map(str, sizes)) for sizes in splits)
        texts.append(f"{count} GPU{'s' if count > 1 else ''}: {', '.join(cuts)}.")
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("samples")
    headline(
        fig,
        "The batch is whole outside the model and split inside",
        "counted in forward, GPU 0 at the bottom",
    )
    show(fig, f"Stacked bars, one per batch: its samples by GPU. {' '.join(texts)}")


def _stack_shares(axes: Axes, x: float, sizes: Sequence[int], idle: int) -> None:
    """Stack the GPUs' shares of a batch, and a dashed box for each idle GPU."""
    bottom = 0
    for order, size in enumerate(sizes):
        color = COLORS["blue"] if order % 2 == 0 else COLORS["sky"]
        axes.bar(x, size, 0.7, bottom, color=color, edgecolor="white")
        axes.text(
            x,
            bottom + size / 2,
            str(size),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if order % 2 == 0 else "black",
        )
        bottom += size
    for above in range(idle):
        low = bottom + 0.4 + 2.6 * above
        axes.add_patch(Rectangle((x - 0.35, low), 0.7, 2.2, fill=False, ls="--", ec="#555555"))
        axes.text(x, low + 1.05, "idle", ha="center", va="center", fontsize=7)


def split_grid(chunks: Sequence[torch.Tensor], apart: torch.Tensor, dim: int, heading: str) -> None:
    """Draw a batch as a grid, a row per sequence, colored by the GPU that got each cell.

    ``chunks`` are the inputs (T, B, ...) as scattered along ``dim``, one per GPU. ``apart`` (T, B)
    is written in the cells: how far the output is from a single GPU's.
    """
    steps, sequences = apart.shape
    owners = [chunk.device for chunk in chunks for _ in range(chunk.shape[dim])]
    colors = {chunk.device: color for chunk, color in zip(chunks, RANK_COLORS, strict=False)}
    fig, axes = figure(width=6.5, height=1.1 + 0.28 * sequences)
    for step, row in product(range(steps), range(sequences)):
        color = colors[owners[row if dim else step]]
        axes.add_patch(Rectangle((step, row), 1, 1, facecolor=color, edgecolor="white"))
        text = f"{apart[step, row]:.2f}"
        axes.text(step + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9)
    axes.set(xlim=(0, steps), ylim=(sequences, 0), xlabel="time step", ylabel="sequence")
    axes.set_xticks([step + 0.5 for step in range(steps)], range(1, steps + 1))
    axes.set_yticks([row + 0.5 for row in range(sequences)], range(1, sequences + 1))
    axes.tick_params(length=0)
    axes.grid(visible=False)
    keys = [Patch(color=color, label=str(gpu)) for gpu, color in colors.items()]
    legend_beside(axes, handles=keys)
    title(axes, heading, "in the cells: largest difference from a single GPU's output")
    along = "time steps" if dim == 0 else "sequences"
    parts = ", ".join(f"{chunk.shape[dim]} {along} on {chunk.device}" for chunk in chunks)
    show(
        fig,
        f"A grid of {sequences} sequences by {steps} time steps, split into {parts}. The largest "
        f"difference is {apart.max():.2f}.",
    )


# The causes that a Snapshot of an iteration can have.
_CAUSES = ("parameters", "inputs", "replicas", "outputs", "gradients", "optimizer state", OTHER)


# The columns of the diagram of a call: the batch, then each step.
_COLUMNS = ("batch", "scatter", "replicate", "parallel_apply", "gather", "backward, reduce")


def four_parts(
    chunks: Sequence[torch.Tensor],
    weights: Sequence[int],
    outputs: Sequence[torch.Tensor],
    output: torch.Tensor,
    *,
    backward: bool = False,
) -> None:
    """Draw a call to DataParallel as boxes with sizes: a row per GPU, with time going to the right.

    ``chunks`` and ``outputs`` have one tensor per GPU, in order; ``weights`` has each replica's
    number of parameters, and ``output`` is what was gathered on the first GPU. ``backward`` adds
    the gradients.
    """
    gpus = [chunk.device for chunk in chunks]
    columns = _COLUMNS if backward else _COLUMNS[:-1]
    fig, axes = figure(
        width=(1.45 if backward else 1.6) * len(columns), height=1.1 + 0.85 * len(gpus)
    )
    _box(axes, 0, 0, f"batch\n{len(output)} × {chunks[0].shape[1]}", "gray")
    for row, (gpu, chunk, out) in enumerate(zip(gpus, chunks, outputs, strict=True)):
        axes.text(-0.55, row, str(gpu), ha="right", va="center")
        _box(axes, 1, row, f"chunk\n{_by(chunk)}", "gray")
        what = "your model" if row == 0 else "a copy"
        _box(axes, 2, row, f"{what}\n{weights[row]:,} parameters", "blue" if row == 0 else "sky")
        _box(axes, 3, row, f"output\n{_by(out)}", "orange")
        _arrow(axes, (0, 0), (1, row))
        _arrow(axes, (1, row), (2, row))
        _arrow(axes, (2, row), (3, row))
        _arrow(axes, (3, row), (4, 0))
        if row > 0:
            _arrow(axes, (2, row - 1), (2, row), down=True)
    after = f"output {_by(output)}\nand its loss" if backward else f"output\n{_by(output)}"
    _box(axes, 4, 0, after, "orange")
    if backward:
        _draw_gradients(axes, weights)
    axes.set(xlim=(-1.2, len(columns) - 0.5), ylim=(len(gpus) - 0.55, -0.85))
    for column, name in enumerate(columns):
        axes.text(column, -0.65, name, ha="center", va="center", color="#444444", fontsize=9)
    axes.axis("off")
    back = ", and back again" if backward else ""
    headline(fig, f"Split, copied, computed, joined{back}", "sizes from a real call")
    cut = ", ".join(f"{_by(chunk)} on {gpu}" for chunk, gpu in zip(chunks, gpus, strict=True))
    show(
        fig,
        f"Boxes and arrows, a row for each GPU. The batch on {gpus[0]} is scattered: {cut}. The "
        f"model's {weights[0]:,} parameters are copied from {gpus[0]} to the others. Each replica's "
        f"output goes back to {gpus[0]}: {_by(output)} in total."
        + (
            f" Backward starts at the loss on {gpus[0]}; each GPU computes its own gradients, which are "
            f"summed on {gpus[0]}."
            if backward
            else ""
        ),
    )


def _draw_gradients(axes: Axes, weights: Sequence[int]) -> None:
    for row, count in enumerate(weights):
        whose = "your model's" if row == 0 else "the copy's"
        _box(axes, 5, row, f"{whose}\n{count:,} gradients", "vermilion")
        _arrow(axes, (4, 0), (5, row))
        if row > 0:
            _arrow(axes, (5, row), (5, row - 1), down=True)
            axes.text(5.06, row - 0.5, "+", fontsize=13, va="center")


def _by(tensor: torch.Tensor) -> str:
    return " × ".join(map(str, tensor.shape))


def _box(axes: Axes, column: int, row: int, text: str, color: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (column - 0.38, row - 0.24),
            0.76,
            0.48,
            boxstyle="round,pad=0.03",
            facecolor=COLORS[color],
            alpha=0.35,
            edgecolor=COLORS[color],
        )
    )
    axes.text(column, row, text, ha="center", va="center", fontsize=8)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, down: bool = False
) -> None:
    """Draw an arrow between two boxes: from a right edge to a left edge, or along a column."""
    if down:
        step = 0.3 if end[1] > start[1] else -0.3
        ends = (start[0], start[1] + step), (end[0], end[1] - step)
    else:
        ends = (start[0] + 0.41, start[1]), (end[0] - 0.41, end[1])
    axes.annotate(
        "", xy=ends[1], xytext=ends[0], arrowprops={"arrowstyle": "->", "color": "#555555"}
    )


def iteration(steps: Sequence[Snapshot], at_the_peak: Mapping[str, int]) -> None:
    """Plot MiB by cause: a panel per GPU, a stacked bar after each step, and marks at the peaks.

    ``at_the_peak`` maps the largest tensors at the first GPU's highest peak to their bytes;
    they are drawn beside its panel, on the same scale, above the rest of that peak.
    """
    gpus = list(steps[-1].by_cause)
    fig, grid = figure(
        len(gpus),
        2,
        width=8,
        height=2.2 * len(gpus),
        sharex="col",
        sharey=True,
        squeeze=False,
        gridspec_kw={"width_ratios": (3.4, 1)},
    )
    panels = grid[:, 0]
    places = range(len(steps))
    for gpu, axes in zip(gpus, panels, strict=True):
        sizes = {
            cause: [step.by_cause[gpu].get(cause, 0) / MIB for step in steps]
            for cause in steps[-1].by_cause[gpu]
        }
        stacked_bars(axes, places, sizes, CAUSE_COLORS, width=0.7)
        peaks = [step.peak_bytes[gpu] / MIB for step in steps]
        # A white outline sets the peak line off from dark parts of a bar.
        rim = [withStroke(linewidth=4, foreground="white")]
        ends = [x - 0.42 for x in places], [x + 0.42 for x in places]
        axes.hlines(peaks, *ends, color="black", path_effects=rim)
        highest = max(places, key=lambda place: peaks[place])
        place = highest, peaks[highest]
        text_near(axes, f"peak {peaks[highest]:.1f}", place, (0, 5), ha="center", fontsize=9)
        axes.set_ylabel(f"{gpu}\nMiB")
    top = max(step.peak_bytes[gpu] for step in steps for gpu in gpus) / MIB
    panels[0].set_ylim(0, 1.25 * top)
    panels[-1].set_xticks(places, [_two_lines(step.step) for step in steps], fontsize=7)
    panels[0].legend(loc="upper left", ncols=2, fontsize=8)
    others = "GPU 1 doesn't" if len(gpus) == 2 else "the others don't"
    headline(fig, f"GPU 0 holds what {others}", "counted; a line marks the peak")
    for axes in grid[1:, 1]:
        axes.set_axis_off()
    peak = _pile_up(grid[0, 1], steps, gpus[0], at_the_peak)
    summary = "; ".join(
        f"{gpu} holds "
        + ", ".join(f"{format_bytes(step.total_bytes(gpu))} after {step.step}" for step in steps)
        + f", and {format_bytes(max(step.peak_bytes[gpu] for step in steps))} at its peak"
        for gpu in gpus
    )
    bars = (
        f"Stacked bars of bytes by cause, a panel for each GPU and a bar for each step: {summary}."
    )
    show(fig, bars + peak)


def _pile_up(
    axes: Axes, steps: Sequence[Snapshot], gpu: torch.device, tensors: Mapping[str, int]
) -> str:
    """Draw a box for each tensor at the GPU's highest peak; return the alternative text."""
    highest = max(steps, key=lambda step: step.peak_bytes[gpu])
    rest = highest.peak_bytes[gpu] - sum(tensors.values())
    bottom, top = 0.0, highest.peak_bytes[gpu] / MIB
    for name, size in {"the rest": rest, **tensors}.items():
        cause = name if name in CAUSE_COLORS else OTHER
        color = "white" if name == "the rest" else CAUSE_COLORS[cause]
        height, middle = size / MIB, bottom + size / MIB / 2
        axes.bar(0, height, 1, bottom, color=color, edgecolor="black", linewidth=0.8)
        is_low = height < top / 8  # too low for text
        x, align = (0.55, "left") if is_low else (0.0, "center")
        axes.text(x, middle, name, ha=align, va="center", fontsize=8)
        bottom += height
    axes.set_xlim(-0.52, 0.52)
    axes.grid(visible=False)
    axes.set_xticks([])
    step = highest.step.partition(" ")[0]
    axes.set_title(f"peak of step {step}, {gpu}", fontsize=8)
    each = ", ".join(f"{name} {format_bytes(size)}" for name, size in tensors.items())
    return f" At the peak of step {step}, {gpu} holds {each}, and {format_bytes(rest)} of other tensors."


def one_step(step: Snapshot, most_bytes: int) -> None:
    """Plot MiB by cause at one moment, a bar per GPU; the axis ends at ``most_bytes``."""
    fig, axes = figure(width=7.5, height=0.8 + 0.55 * len(step.by_cause))
    gpus = list(step.by_cause)[::-1]
    # Include every cause, present or not, to keep the legend the same for every step.
    sizes = {cause: [step.by_cause[gpu].get(cause, 0) / MIB for gpu in gpus] for cause in _CAUSES}
    stacked_bars(axes, range(len(gpus)), sizes, CAUSE_COLORS, across=True)
    axes.set_yticks(range(len(gpus)), [str(gpu) for gpu in gpus])
    axes.set(xlim=(0, most_bytes / MIB * 1.02), xlabel="MiB, counted")
    legend_beside(axes)
    headline(fig, f"After step {step.step}", "bytes by cause")
    summary = "; ".join(
        f"{gpu} "
        + (
            ", ".join(f"{name} {format_bytes(size)}" for name, size in causes.items() if size)
            or "0"
        )
        for gpu, causes in step.by_cause.items()
    )
    show(fig, f"Stacked bars of bytes by cause, one per GPU, after step {step.step}: {summary}.")


def peaks_before_and_after(
    gpus: Sequence[torch.device], outside: Sequence[int], inside: Sequence[int]
) -> None:
    """Plot each GPU's peak bytes with the loss outside the model, and with it in forward."""
    fig, axes = figure(width=7, height=3)
    for index, gpu in enumerate(gpus):
        color = COLORS["vermilion"] if index == 0 else COLORS["blue"]
        places = [index * 0.4, index * 0.4 + len(gpus) * 0.4 + 0.4]
        sizes = [outside[index] / MIB, inside[index] / MIB]
        bars: Any = axes.bar(places, sizes, 0.36, color=color, label=str(gpu))
        axes.bar_label(bars, fmt="%.1f", padding=2)
    middle = (len(gpus) - 1) * 0.2
    axes.set_xticks(
        [middle, middle + len(gpus) * 0.4 + 0.4],
        ["outputs gathered, loss outside", "loss in forward"],
    )
    axes.set(ylabel="peak of one step, MiB", ylim=(0, max(outside) / MIB * 1.15))
    axes.grid(axis="x", visible=False)
    axes.legend()
    headline(fig, "Returning the loss from forward evens out the memory", "counted")
    each = "; ".join(
        f"{gpu} {format_bytes(before)} with the loss outside, {format_bytes(after)} with it in forward"
        for gpu, before, after in zip(gpus, outside, inside, strict=True)
    )
    show(fig, f"Bar chart of one step's peak bytes per GPU: {each}.")


def _two_lines(step: str) -> str:
    number, _, words = step.partition(" ")
    first, _, rest = words.partition(" ")
    return f"{number} {first}\n{rest}"


def data_parallel_against_ddp(
    times_s: Mapping[int, tuple[float, float]], gpu: str, batch_size: int
) -> None:
    """Plot iteration time and speedup by number of GPUs.

    ``times_s`` maps a number of GPUs to (DataParallel's, DDP's) seconds.
    """
    counts = sorted(times_s)
    fig, (left, right) = figure(1, 2, width=9, height=3.2)
    for way, (name, marker, color) in enumerate(
        (("DataParallel", "s-", "orange"), ("DDP", "o-", "blue"))
    ):
        each_s = [times_s[count][way] for count in counts]
        look: Any = {"color": COLORS[color], "label": name}
        left.plot(counts, [1e3 * time_s for time_s in each_s], marker, **look)
        right.plot(counts, [each_s[0] / time_s for time_s in each_s], marker, **look)
    right.plot(counts, [n / counts[0] for n in counts], "--", color=COLORS["gray"], label="ideal")
    for axes in (left, right):
        log2_ticks(axes, counts)
        axes.set(ylim=(0, None), xlabel="GPUs")
    left.set_ylabel("iteration time (ms)")
    right.set_ylabel("speedup")
    right.legend(fontsize=9)
    headline(fig, f"The same {batch_size} images on more GPUs", f"virtual time, {gpu}")
    summary = "; ".join(
        f"{count} GPU{'s' if count > 1 else ''}: {1e3 * times_s[count][0]:.0f} and "
        f"{1e3 * times_s[count][1]:.0f} ms"
        for count in counts
    )
    show(fig, f"Iteration time and speedup of DataParallel and DDP, by number of GPUs. {summary}.")
