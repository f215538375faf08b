"""What ``torch.cuda`` has and virtual GPUs lack: the error says so, and what to do."""

from collections.abc import Callable
from typing import Any

import torch

from vgpu.memory import gpus


def of(submodule: str) -> Callable[[str], Any]:
    """``__getattr__`` of ``torch.vgpu``, or of the module of this name in it."""
    inside = f".{submodule}" if submodule else ""
    ours, theirs = f"torch.{gpus.DEVICE_TYPE}{inside}", f"torch.cuda{inside}"

    def __getattr__(name: str) -> Any:
        there = getattr(torch.cuda, submodule) if submodule else torch.cuda
        if name.startswith("__") or name not in dir(there):
            raise AttributeError(f"module '{ours}' has no attribute '{name}'")
        advice = f"leave it out where hasattr({ours}, '{name}') is False"
        if name.endswith("Tensor"):  # torch.cuda.FloatTensor and its kind, for old programs
            advice = f"make tensors with dtype= and device=, or torch.set_default_device('{gpus.DEVICE_TYPE}')"
        raise AttributeError(
            f"module '{ours}' has no attribute '{name}': {theirs} has one, virtual GPUs have "
            f"nothing like it; {advice}"
        )

    return __getattr__
