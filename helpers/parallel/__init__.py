"""Layouts of a training over many ranks, and a transformer divided by one."""

from helpers.parallel.division import loss_context, shard, share_tensors
from helpers.parallel.layout import KINDS, Layout, check_tensors, named_layout

__all__ = [
    "KINDS",
    "Layout",
    "check_tensors",
    "loss_context",
    "named_layout",
    "shard",
    "share_tensors",
]
