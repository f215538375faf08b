"""Who gets how much of a batch, from PyTorch's own scatter, for any batch and number of GPUs."""

from collections.abc import Sequence

import ipywidgets
import torch
from torch.nn.parallel import scatter

from helpers import plots
from helpers.widgets.live import live


def share_sizes(batch_size: int, gpus: Sequence[torch.device]) -> list[int]:
    """Samples that each of ``gpus`` gets of a batch, as the real scatter cuts it; 0 for idle ones.

    Raises ValueError for an empty batch, which scatter cannot cut.
    """
    if batch_size < 1:
        raise ValueError(f"a batch has at least one sample, got {batch_size}")
    chunks = scatter(torch.empty(batch_size, 1, device=gpus[0]), list(gpus))
    sizes = [len(chunk) for chunk in chunks]
    return sizes + [0] * (len(gpus) - len(sizes))


def describe_shares(sizes: Sequence[int]) -> str:
    """The shares in a sentence: how many GPUs work, and what the idle ones miss."""
    working = sum(size > 0 for size in sizes)
    told = f"{sum(sizes)} samples: {working} of {len(sizes)} GPUs get something"
    if working < len(sizes):
        told += f", {len(sizes) - working} idle"
    if max(sizes) != min(sizes):
        slowest = max(sizes) * len(sizes) / sum(sizes)
        told += f". The largest share is {slowest:.2f} times an equal one"
    return told + "."


def show_shares(batch_size: int, gpu_count: int, gpus: Sequence[torch.device]) -> None:
    """Draw the shares of a batch on the first ``gpu_count`` of ``gpus``, and say them."""
    sizes = share_sizes(batch_size, gpus[:gpu_count])
    plots.share_bars(sizes)
    print(describe_shares(sizes))


def shares_explorer(gpus: Sequence[torch.device]) -> ipywidgets.Widget:
    """Two sliders around ``show_shares``: the batch size and the number of GPUs."""
    batch_size = ipywidgets.IntSlider(10, min=1, max=64, description="batch size")
    gpu_count = ipywidgets.IntSlider(len(gpus), min=1, max=len(gpus), description="GPUs")
    drawn = live(
        lambda batch_size, gpu_count: show_shares(batch_size, gpu_count, gpus),
        {"batch_size": batch_size, "gpu_count": gpu_count},
    )
    return ipywidgets.VBox([ipywidgets.HBox([batch_size, gpu_count]), drawn])
