"""DistributedDataParallel on virtual GPUs."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vgpu.memory import gpus
from vgpu.torch_patches.undo import Changes

process_groups: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Those over which a DistributedDataParallel adds up gradients; not their names, which come again."""


def install(changes: Changes) -> None:
    changes.wrap(DistributedDataParallel, "_ddp_init_helper", _without_times)


def _without_times(plain: Callable[..., Any]) -> Callable[..., Any]:
    """C++ times DDP's parts on the CPU and on CUDA only, and warns of any other device."""

    @functools.wraps(plain)
    def helper(ddp: Any, *args: Any, **kwargs: Any) -> None:
        plain(ddp, *args, **kwargs)
        process_groups.add(ddp.process_group)
        if ddp.device_type == gpus.DEVICE_TYPE:
            ddp.logger = _Logger(ddp.logger)

    return helper


class _Logger:
    """DDP's own logger, but for times."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Nothing: there are no times to log."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)
