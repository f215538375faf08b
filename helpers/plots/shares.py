"""Who received how much of a batch."""

from collections.abc import Sequence

import torch

from helpers.plots.style import COLOURS, figure, headline, show, title


def shares(runs: dict[int, list[tuple[torch.device, int]]]) -> None:
    """One panel a run: the samples that each GPU received.

    ``runs`` maps a number of GPUs to ``(device, samples)`` pairs, as noted by a hook. GPUs that
    received nothing are marked with 0.
    """
    made, panels = figure(1, len(runs), width=8.5, height=2.9, sharey=True, squeeze=False)
    texts = []
    for axes, (count, received) in zip(panels[0], runs.items(), strict=True):
        samples = [0] * count
        for device, size in received:
            samples[device.index] += size
        bars = axes.bar(range(count), samples, color=COLOURS["blue"], width=0.7)
        axes.bar_label(bars, fontsize=8 if count > 4 else 9, padding=2)
        axes.set_xticks(range(count))
        axes.set_xlim(-0.8, max(count, 3) - 0.2)
        axes.set_xlabel(f"GPU (of {count})")
        texts.append(f"Of {count} GPUs: {', '.join(map(str, samples))}.")
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("samples received")
    headline(made, "Every GPU gets a share of the batch", "counted by a hook")
    show(made, f"Bars of samples by GPU. {' '.join(texts)}")


def share_bars(sizes: Sequence[int]) -> None:
    """One bar a GPU: its share of a batch, with the idle ones marked."""
    made, axes = figure(width=7.5, height=2.6)
    bars = axes.bar(range(len(sizes)), sizes, color=COLOURS["blue"], width=0.7)
    axes.bar_label(bars, [str(size) if size else "idle" for size in sizes], padding=2)
    axes.set_xticks(range(len(sizes)), [f"GPU {index}" for index in range(len(sizes))])
    axes.set_ylabel("samples")
    axes.set_ylim(0, max(sizes) * 1.2)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="x", visible=False)
    title(axes, f"A batch of {sum(sizes)} on {len(sizes)} GPUs", "counted from PyTorch's scatter")
    each = ", ".join(f"GPU {index} {size or 'idle'}" for index, size in enumerate(sizes))
    show(made, f"Bars of samples by GPU, for a batch of {sum(sizes)}: {each}.")


def replica_sizes(records: dict[int, list[list[tuple[torch.device, int]]]]) -> None:
    """For each number of GPUs, one stacked bar a batch: what each replica received, GPU 0 lowest.

    ``records[gpu_count][batch]`` lists ``(device, samples)`` of the replicas that ran.
    """
    made, panels = figure(1, len(records), width=8.5, height=3.1, sharey=True, squeeze=False)
    texts = []
    for axes, (count, batches) in zip(panels[0], records.items(), strict=True):
        for index, received in enumerate(batches):
            bottom = 0
            for order, (_, size) in enumerate(sorted(received, key=lambda r: r[0].index)):
                colour = COLOURS["blue"] if order % 2 == 0 else COLOURS["sky"]
                axes.bar(index + 1, size, 0.7, bottom, color=colour, edgecolor="white")
                axes.text(
                    index + 1,
                    bottom + size / 2,
                    size,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if order % 2 == 0 else "black",
                )
                bottom += size
        axes.set_xticks(range(1, len(batches) + 1))
        axes.set_xlabel(f"batch ({count} GPU{'s' if count > 1 else ''})")
        cuts = ("+".join(str(size) for _, size in received) for received in batches)
        texts.append(f"{count} GPU{'s' if count > 1 else ''}: {', '.join(cuts)}.")
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("samples")
    headline(
        made, "The batch stays whole outside and is cut inside", "counted in forward, GPU 0 lowest"
    )
    show(made, f"Stacked bars of samples, one a batch, cut by GPU. {' '.join(texts)}")
