"""``torch.vgpu.amp``: the older names of automatic mixed precision, as in ``torch.cuda.amp``."""

import functools
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.torch_patches.submodules import missing

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.amp.autocast):
    """``torch.autocast("vgpu")``; float16 unless told otherwise."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__(gpus.DEVICE_TYPE, dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("vgpu")``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(gpus.DEVICE_TYPE, *args, **kwargs)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=gpus.DEVICE_TYPE)
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=gpus.DEVICE_TYPE)


__getattr__ = missing.of("amp")
