"""Functions of torch that must speak of virtual GPUs: refuse clearly, or name the device rightly."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from helpers.vgpu import gpus

# C++ writes lazy:0 for a device and 'lazy' for its type.
_CPP_NAME = re.compile(rf"\b{gpus.CPP_DEVICE_TYPE}(?=:\d|')")
_plain_make_dual = torch.autograd.forward_ad.make_dual


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor, *, level: int | None = None) -> Any:
    """``torch.autograd.forward_ad.make_dual``, which C++ cannot do for virtual tensors."""
    if tensor.device.type in (gpus.DEVICE_TYPE, gpus.CPP_DEVICE_TYPE):
        raise NotImplementedError(
            "forward-mode automatic differentiation is not supported on virtual GPUs: "
            "use backward(), or tensors on the CPU"
        )
    return _plain_make_dual(tensor, tangent, level=level)


def refusing_virtual_models(plain_compile: Callable) -> Callable:
    """``torch.compile``, which would warn at length and then run a virtual model uncompiled."""

    @functools.wraps(plain_compile)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(model, "__self__", model)  # Module.compile hands over a bound method
        if isinstance(owner, torch.nn.Module):
            for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
                if tensor.device.type == gpus.DEVICE_TYPE:
                    raise NotImplementedError(
                        f"torch.compile is not supported on virtual GPUs, and {name} is on "
                        f"{tensor.device}: run the model as it is, or compile it on the CPU"
                    )
        return plain_compile(model, *args, **kwargs)

    return compile


def naming_devices(function: Callable) -> Callable:
    """``function``, whose errors name ``vgpu:k`` where C++ wrote ``lazy:k``."""

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            text = _CPP_NAME.sub(gpus.DEVICE_TYPE, str(error))
            if text == str(error):
                raise
            raise type(error)(text) from None

    return renamed
