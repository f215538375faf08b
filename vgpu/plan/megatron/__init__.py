"""Megatron-LM's training runs of 2021 on a virtual cluster: its layers, its ten rows, its seconds."""

from vgpu.plan.megatron.layers import SEQUENCE, VOCABULARY, Layers, Recipe, Sizes
from vgpu.plan.megatron.training import (
    FITTED,
    FULL,
    ROWS,
    SELECTIVE,
    Published,
    Run,
    Shares,
    fitted,
    seconds_at,
    step_s,
    tera,
)

__all__ = [
    "FITTED",
    "FULL",
    "ROWS",
    "SELECTIVE",
    "SEQUENCE",
    "VOCABULARY",
    "Layers",
    "Published",
    "Recipe",
    "Run",
    "Shares",
    "Sizes",
    "fitted",
    "seconds_at",
    "step_s",
    "tera",
]
