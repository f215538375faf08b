"""A training on a cluster that does not exist, planned: ``python -m helpers.plan``."""

from helpers.plan.step import CHECKPOINTS, Plan, Step, predict

__all__ = ["CHECKPOINTS", "Plan", "Step", "predict"]
