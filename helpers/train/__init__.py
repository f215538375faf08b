"""The training of lesson 07 as a command and as a class: ``python -m helpers.train``."""

from helpers.train.folders import CheckpointError
from helpers.train.training import Settings, Training

__all__ = ["CheckpointError", "Settings", "Training"]
