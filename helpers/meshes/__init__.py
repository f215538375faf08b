"""Meshes of GPUs on paper: groups, bytes on links, and the time of a step, from sizes alone."""

from helpers.meshes.steps import DIMENSIONS, Step, Traffic, groups, step

__all__ = ["DIMENSIONS", "Step", "Traffic", "groups", "step"]
