"""Explorers for DataParallel: batch shares, the parts of one call, and bytes per GPU by step."""

from collections.abc import Sequence
from operator import attrgetter

import ipywidgets
import torch
from IPython.display import display
from torch import nn
from torch.nn.parallel import scatter

from helpers import plots
from helpers.widgets.live import explorer
from vgpu.profiling.memory import Snapshot
from vgpu.tables import Table
from vgpu.units import format_bytes


def share_sizes(batch_size: int, gpus: Sequence[torch.device]) -> list[int]:
    """Return how many samples each of ``gpus`` gets from the real scatter; 0 for idle ones."""
    chunks = scatter(torch.empty(batch_size, 1, device=gpus[0]), list(gpus))
    sizes = [len(chunk) for chunk in chunks]
    return sizes + [0] * (len(gpus) - len(sizes))


def describe_shares(sizes: Sequence[int]) -> str:
    """Describe the shares: how many GPUs compute, how many are idle, and the largest share."""
    working = sum(size > 0 for size in sizes)
    text = f"{sum(sizes)} samples: {working} of {len(sizes)} GPUs get work"
    if working < len(sizes):
        text += f", {len(sizes) - working} idle"
    if max(sizes) != min(sizes):
        slowest = max(sizes) * len(sizes) / sum(sizes)
        text += f". The largest share is {slowest:.2f} times an equal share"
    return text + "."


def show_shares(batch_size: int, gpu_count: int, gpus: Sequence[torch.device]) -> None:
    """Draw and describe the shares of a batch on the first ``gpu_count`` of ``gpus``."""
    sizes = share_sizes(batch_size, gpus[:gpu_count])
    plots.share_bars(sizes)
    print(describe_shares(sizes))


def shares_explorer(gpus: Sequence[torch.device]) -> ipywidgets.Widget:
    """Return sliders for ``show_shares``: the batch size and the number of GPUs."""
    batch_size = ipywidgets.IntSlider(10, min=1, max=64, description="batch size")
    gpu_count = ipywidgets.IntSlider(len(gpus), min=1, max=len(gpus), description="GPUs")
    return explorer(
        lambda batch_size, gpu_count: show_shares(batch_size, gpu_count, gpus),
        {"batch_size": batch_size, "gpu_count": gpu_count},
    )


def show_parts(
    module: nn.Module,
    batch: torch.Tensor,
    gpus: Sequence[torch.device],
    *,
    backward: bool = False,
) -> None:
    """Draw one call of nn.DataParallel on ``gpus``, with the sizes that its replicas saw.

    ``module`` must be on the first of ``gpus``, and isn't changed. ``backward`` adds the gradients.
    """
    names = [name for name, _ in module.named_parameters()]
    seen = {}

    def note(replica: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        # A replica's parameters are plain tensors, which parameters() doesn't list.
        weights = sum(attrgetter(name)(replica).numel() for name in names)
        seen[output.device] = inputs[0], weights, output

    handle = module.register_forward_hook(note)
    with torch.no_grad():
        output = nn.DataParallel(module, list(gpus))(batch)
    handle.remove()
    chunks, weights, outputs = zip(*(seen[gpu] for gpu in gpus), strict=True)
    plots.four_parts(chunks, weights, outputs, output, backward=backward)


def step_table(steps: Sequence[Snapshot], number: int) -> Table:
    """Return a table of bytes on each GPU after step ``number`` (from 1), and their change."""
    now = steps[number - 1]
    before = steps[number - 2] if number > 1 else None
    rows = []
    for gpu, causes in now.by_cause.items():
        for cause, size in causes.items():
            earlier = before.by_cause[gpu].get(cause, 0) if before else 0
            if size or earlier:
                change = size - earlier
                sign = "+" if change > 0 else "-"
                changed = f"{sign}{format_bytes(abs(change))}" if change else ""
                rows.append((gpu, cause, format_bytes(size), changed))
    return Table(("GPU", "what", "bytes", "this step"), rows)


def show_step(steps: Sequence[Snapshot], number: int) -> None:
    """Draw step ``number`` (from 1), and list the bytes on each GPU."""
    table = step_table(steps, number)
    most = max(step.total_bytes(gpu) for step in steps for gpu in step.by_cause)
    plots.one_step(steps[number - 1], most)
    display(table)


def iteration_explorer(steps: Sequence[Snapshot]) -> ipywidgets.Widget:
    """Return a slider for the step, together with ``show_step``'s output."""
    number = ipywidgets.IntSlider(1, min=1, max=len(steps), description="step")
    every = {"number": range(1, len(steps) + 1)}
    return explorer(lambda number: show_step(steps, number), {"number": number}, every)
