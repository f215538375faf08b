"""A training run on a cluster that does not exist, planned: ``python -m helpers.plan``."""

from helpers.plan.layouts import Candidate, Found, search
from helpers.plan.rank import predict
from helpers.plan.step import CHECKPOINTS, Plan, Step

__all__ = ["CHECKPOINTS", "Candidate", "Found", "Plan", "Step", "predict", "search"]
