"""A training run on a cluster that does not exist, planned: ``python -m vgpu.plan``."""

from vgpu.plan.layouts import Candidate, Found, search
from vgpu.plan.rank import predict
from vgpu.plan.step import CHECKPOINTS, Plan, Step

__all__ = ["CHECKPOINTS", "Candidate", "Found", "Plan", "Step", "predict", "search"]
