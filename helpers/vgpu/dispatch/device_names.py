"""Where torch must name the device as the user does: ``vgpu:k``, never as C++ knows it."""

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.vgpu.changes import Changes
from helpers.vgpu.device import gpus
from helpers.vgpu.dispatch.operators import Args, Kwargs, Operator

P = ParamSpec("P")
R = TypeVar("R")

# C++ writes lazy:0 for a device, 'lazy' or device=lazy for its type.
_CPP_NAME = re.compile(rf"\b{gpus.CPP_DEVICE_TYPE}(?=:\d|'|,)")


def naming_devices(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose errors name ``vgpu:k`` where C++ wrote ``lazy:k``."""

    @functools.wraps(function)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, BufferError, TypeError) as error:
            text = _CPP_NAME.sub(gpus.DEVICE_TYPE, str(error))
            if text == str(error):
                raise
            raise type(error)(text) from None

    return renamed


def install(changes: Changes) -> None:
    enter = functools.partial(_entering, changes=changes, seen=set())
    changes.wrap(TorchDispatchMode, "__enter__", enter)


def _entering(
    plain: Callable[[TorchDispatchMode], Any], *, changes: Changes, seen: set[type]
) -> Callable[[TorchDispatchMode], Any]:
    """``TorchDispatchMode.__enter__``: what the mode is handed names devices as the user does."""

    @functools.wraps(plain)
    def __enter__(mode: TorchDispatchMode) -> Any:
        owner = next(cls for cls in type(mode).__mro__ if "__torch_dispatch__" in vars(cls))
        # Ours know both names, and have no time to lose.
        if owner not in seen and not owner.__module__.startswith("helpers.vgpu."):
            seen.add(owner)
            changes.wrap(owner, "__torch_dispatch__", _handed_names)
        return plain(mode)

    return __enter__


def _handed_names(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def __torch_dispatch__(
        mode: TorchDispatchMode,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        device = kwargs and kwargs.get("device")
        if kwargs and isinstance(device, torch.device):
            gpu = gpus.resolve(device)
            if gpu is not None:
                kwargs = {**kwargs, "device": gpu.device}
        return plain(mode, func, types, args, kwargs or {})

    return __torch_dispatch__
