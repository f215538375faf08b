"""Functions of torch whose errors must name the device as the user does."""

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from helpers.vgpu.device import gpus

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
