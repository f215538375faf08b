"""Figures for devices: tensors in a machine's memories, and the physical GPUs behind ordinals."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from helpers.plots.style import COLORS, arrow, figure, headline, show, title

_BOX: Any = {"boxstyle": "round,pad=0.02,rounding_size=0.06", "linewidth": 1.2}


def memories(
    tensors: Mapping[str, torch.Tensor],
    gpus: Sequence[torch.device],
    copies: Sequence[tuple[str, str]] = (),
    heading: str = "A copy is another tensor",
) -> None:
    """Draw the machine's memories as boxes with their tensors, and copies as arrows.

    Vectors of up to three elements are shown with their values, other tensors with their shapes.
    ``copies`` are (source, target) pairs of names. Two names for the same tensor share a box.
    """
    devices = [torch.device("cpu"), *gpus]
    places = _in_memories(tensors, devices)
    fig, axes = figure(width=7.5, height=2.3 if copies else 1.9)
    axes.set(xlim=(0, 3 * len(devices)), ylim=(0.1 if copies else 0.65, 3.1))
    axes.set_axis_off()
    for column, device in enumerate(devices):
        name = "main memory (cpu)" if device.type == "cpu" else f"memory of {device}"
        corner = (3 * column + 0.25, 0.75)
        axes.add_patch(FancyBboxPatch(corner, 2.5, 1.7, fc="#F5F5F5", ec="#999999", **_BOX))
        axes.text(3 * column + 1.5, 2.62, name, ha="center", fontsize=10)
    for (x, y), names in places.items():
        color = COLORS["orange" if x < 3 else "blue"]
        axes.add_patch(FancyBboxPatch((x - 1.1, y - 0.25), 2.2, 0.5, fc="white", ec=color, **_BOX))
        tensor = tensors[names[0]]
        shown = f"[{', '.join(f'{round(x, 2):g}' for x in tensor.flatten().tolist())}]"
        inside = shown if tensor.dim() == 1 and len(tensor) <= 3 else tuple(tensor.shape)
        axes.text(x, y, f"{', '.join(names)}  {inside}", ha="center", va="center", fontsize=9)
    where = {name: place for place, names in places.items() for name in names}
    for source, target in copies:
        (x, y), (end, level) = where[source], where[target]
        _copy(axes, (x, y), (end, level))
    title(axes, heading, "devices as PyTorch names them")
    sentences = [f"{' and '.join(names)} in {_memory(x)}" for (x, _), names in places.items()]
    arrows = "".join(f"; an arrow from {a} to {b}" for a, b in copies)
    show(fig, f"The machine's memories as boxes: {'; '.join(sentences)}{arrows}.")


def relabeled(seen: Mapping[str, Sequence[int]], cards: int) -> None:
    """Draw the physical GPUs for each value of CUDA_VISIBLE_DEVICES, with their ordinals.

    ``seen`` maps a value to the physical GPUs behind ``cuda:0``, ``cuda:1`` and so on.
    """
    fig, panels = figure(1, len(seen), width=2.5 * len(seen), height=2.5, squeeze=False)
    for axes, (value, chosen) in zip(panels.flat, seen.items(), strict=True):
        axes.set(xlim=(-0.6, cards - 0.4), ylim=(-0.5, 1.75))
        axes.set_axis_off()
        axes.set_title(f'"{value}"', loc="center")
        for card in range(cards):
            color = COLORS["blue" if card in chosen else "gray"]
            _label(axes, card, 1.2, f"card\n{card}", color, filled=card in chosen)
        for ordinal, card in enumerate(chosen):
            _label(axes, ordinal, 0, f"cuda:\n{ordinal}", COLORS["vermilion"], filled=False)
            arrow(axes, (ordinal, 0.3), (card, 0.9))
        if not chosen:
            axes.text((cards - 1) / 2, 0, "no GPU is visible", ha="center", va="center")
    headline(fig, "The ordinal is the position in the list", "as PyTorch reads it")
    lists = (
        f'"{value}": '
        + (", ".join(f"cuda:{n} is card {c}" for n, c in enumerate(chosen)) or "none")
        for value, chosen in seen.items()
    )
    show(
        fig,
        f"Cards above, ordinals below, and arrows from each ordinal to its card. {'; '.join(lists)}.",
    )


def _in_memories(
    tensors: Mapping[str, torch.Tensor], devices: Sequence[torch.device]
) -> dict[tuple[float, float], list[str]]:
    """Map the center of each box to the names of the tensor in it."""
    places: dict[tuple[float, float], list[str]] = {}
    known: dict[int, tuple[float, float]] = {}
    filled = [0] * len(devices)
    for name, tensor in tensors.items():
        if id(tensor) not in known:
            column = devices.index(tensor.device)
            known[id(tensor)] = (3 * column + 1.5, 2.0 - 0.75 * filled[column])
            filled[column] += 1
        places.setdefault(known[id(tensor)], []).append(name)
    return places


def _copy(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow from one box to another, below any memory in between."""
    (x, y), (goal, level) = start, end
    side = 0.95 if goal > x else -0.95
    text: Any = {"ha": "center", "color": "#B04000"}
    if abs(goal - x) <= 3:
        arrow(axes, (x + side, y), (goal - side, level), COLORS["vermilion"])
        axes.text((x + goal) / 2, (y + level) / 2 + 0.14, ".to", **text)
        return
    below = 0.45
    line: Any = {"color": COLORS["vermilion"], "linewidth": 1.2, "zorder": 2}
    axes.plot([x, x, goal], [y - 0.27, below, below], **line)
    arrow(axes, (goal, below), (goal, level - 0.25), COLORS["vermilion"])
    axes.text((x + goal) / 2, below - 0.25, ".to", **text)


def _memory(x: float) -> str:
    return "main memory" if x < 3 else f"the memory of GPU {int(x // 3) - 1}"


def _label(axes: Axes, x: float, y: float, text: str, color: str, filled: bool) -> None:
    box: Any = {"boxstyle": "round,pad=0.25", "fc": color if filled else "white", "ec": color}
    ink = "white" if filled else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=ink, bbox=box, zorder=3)
