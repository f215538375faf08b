"""A transformer's layer split over H100s, in virtual time, and the figures of one GPU alone."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import vgpu
from vgpu.plan.transformer import TransformerBlock, TransformerSizes

_SPLIT = ("attention", "feed_forward")  # not their norms, nor the residual sums


def layer_on(width: int, tokens: int, degree: int) -> vgpu.Timeline:
    """One block in bfloat16, forward and backward, on ``degree`` H100s of one host."""
    sizes = TransformerSizes(1, width, width // 128, width // 128, 4 * width, 1)
    with vgpu.cluster(1, degree, "H100"), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (degree,))
        with torch.device("vgpu"):
            block = TransformerBlock(sizes).bfloat16()
            x = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
            cos, sin = torch.empty(2, tokens, 64)
        if degree > 1:
            parallelize_module(block, mesh, plan())
        with vgpu.record() as timeline:
            block(x, cos, sin).sum().backward()
    return timeline


def plan() -> dict[str, Any]:
    """By columns, then by rows; the products in front share their input: four all-reduces."""
    whole = Replicate()
    first = ["attention.query", "attention.key", "attention.value"]
    first += ["feed_forward.gate", "feed_forward.up"]
    return {
        **dict.fromkeys(first, ColwiseParallel()),
        "attention.output": RowwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        ),
        "feed_forward": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
    }


def figures_of(alone: vgpu.Timeline, size_bytes: int) -> dict[str, float]:
    """What the exercise gives: of one GPU's kernels, those inside the split parts, and the rest."""
    inside = [e for e in alone.events if e.module.partition(".")[0] in _SPLIT]
    split_s = sum(event.duration_s for event in inside)
    return {
        "split_s": split_s,
        "whole_s": sum(event.duration_s for event in alone.events) - split_s,
        "host_s": alone.host_s,
        "size_bytes": size_bytes,
    }
