"""A training as a command and as a class: ``python -m helpers.train``."""

from helpers.train.checkpoints import CheckpointError
from helpers.train.tasks import Settings
from helpers.train.training import Training

__all__ = ["CheckpointError", "Settings", "Training"]
