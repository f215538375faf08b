"""Meshes of GPUs on paper: groups, bytes on links, and the time of a step, from sizes alone."""

from vgpu.plan.meshes.groups import groups, placement, slowest, slowness
from vgpu.plan.meshes.steps import DIMENSIONS, Step, Traffic, step

__all__ = ["DIMENSIONS", "Step", "Traffic", "groups", "placement", "slowest", "slowness", "step"]
