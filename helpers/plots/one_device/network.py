"""A network drawn from one forward pass: its layers, and the shape that leaves each."""

import torch
from matplotlib.patches import Rectangle
from torch import nn

from helpers.plots.style import COLOURS, figure, show, title

_COLOURS = {"Conv2d": "blue", "Linear": "vermilion", "MaxPool2d": "green"}


def network(model: nn.Module, inputs: torch.Tensor) -> None:
    """The leaf modules in the order in which they run on ``inputs``, with shapes and parameters.

    A bar is as tall as the number of values that leave the layer for one sample, on a log scale.
    """
    layers = _run(model, inputs)
    made, axes = figure(width=8.5, height=3.3)
    values = [inputs[0].numel(), *(torch.Size(shape[1:]).numel() for _, shape, _ in layers)]
    names = ["input", *(name for name, _, _ in layers)]
    shapes = [inputs.shape, *(shape for _, shape, _ in layers)]
    counts = [0, *(count for _, _, count in layers)]
    for x, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        colour = COLOURS[_COLOURS.get(name, "grey")]
        axes.add_patch(Rectangle((x - 0.38, 1), 0.76, values[x] - 1, color=colour))
        size = " × ".join(map(str, shape[1:]))
        axes.text(x, values[x] * 1.15, size, ha="center", va="bottom", fontsize=8)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(1, max(values) * 3), yscale="log")
    labels = [
        f"{name} ({count:,})" if count else name for name, count in zip(names, counts, strict=True)
    ]
    axes.set_xticks(range(len(names)), labels, rotation=30, ha="right", fontsize=9)
    axes.set_ylabel("values for one image")
    total = sum(parameter.numel() for parameter in model.parameters())
    title(
        axes,
        f"{type(model).__name__}: {total:,} parameters",
        "shapes of one forward pass; in brackets: parameters of the layer",
    )
    steps = zip(names, shapes, strict=True)
    chain = ", ".join(f"{name} {'×'.join(map(str, shape[1:]))}" for name, shape in steps)
    show(made, f"The network's layers from left to right, with what leaves each: {chain}.")


def _run(model: nn.Module, inputs: torch.Tensor) -> list[tuple[str, torch.Size, int]]:
    """Name, output shape and number of parameters of each leaf module, as they run."""
    layers: list[tuple[str, torch.Size, int]] = []

    def note(module: nn.Module, _: object, output: torch.Tensor) -> None:
        count = sum(parameter.numel() for parameter in module.parameters())
        layers.append((type(module).__name__, output.shape, count))

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(note) for module in leaves]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return layers
