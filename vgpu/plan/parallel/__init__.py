"""Layouts of a training run over many ranks, and a transformer divided by one."""

from vgpu.plan.parallel.division import loss_context, shard, share_tensors
from vgpu.plan.parallel.layout import KINDS, Layout, check_tensors, named_layout
from vgpu.plan.parallel.stages import Part, Stage, parts

__all__ = [
    "KINDS",
    "Layout",
    "Part",
    "Stage",
    "check_tensors",
    "loss_context",
    "named_layout",
    "parts",
    "shard",
    "share_tensors",
]
