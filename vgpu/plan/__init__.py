"""Plan a training run on a cluster that doesn't exist: ``python -m vgpu.plan``."""

from vgpu.plan.layout import RECOMPUTE, Layout
from vgpu.plan.layout_search import search
from vgpu.plan.pipelines import predict
from vgpu.plan.plan import Plan
from vgpu.plan.recorded_step import Step, extrapolate

__all__ = ["RECOMPUTE", "Layout", "Plan", "Step", "extrapolate", "predict", "search"]
