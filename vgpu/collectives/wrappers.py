"""Tensors around virtual tensors, such as DTensor and what a functional collective hands out.

C++ must know them under the device type whose queue autograd keeps (device/gpus.py); Python shows
the virtual device. Such a class is seen when its first tensor is made, or, where C++ makes it, when
its module is imported: enabling virtual GPUs imports none of them.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from vgpu.changes import Changes
from vgpu.collectives.imported import when_imported
from vgpu.memory import gpus
from vgpu.tensor import generators
from vgpu.tensor.methods import cpp_device
from vgpu.tensor.operator_info import handler
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.tensor import VirtualTensor


def install(changes: Changes) -> None:
    make = functools.partial(_naming_device, changes=changes, seen=set())
    changes.set(
        torch.Tensor,
        "_make_wrapper_subclass",
        staticmethod(make(torch.Tensor._make_wrapper_subclass)),
    )
    if dist.is_available():
        when_imported("torch.distributed.tensor._api", _show_device_of_dtensors, changes)
        when_imported("torch.distributed.tensor._random", _read_offset, changes)


def _naming_device(
    plain: Callable[..., torch.Tensor], *, changes: Changes, seen: set[type]
) -> Callable[..., torch.Tensor]:
    """``Tensor._make_wrapper_subclass``, for wrappers whose device is a virtual GPU."""

    @functools.wraps(plain)
    def make(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        gpu = gpus.resolve(device) if isinstance(device, torch.device) else None
        if gpu is None or issubclass(cls, VirtualTensor):
            return plain(cls, *args, **kwargs)
        if cls not in seen:
            seen.add(cls)
            _show_device(cls, changes)
        return plain(cls, *args, **{**kwargs, "device": gpu.cpp_device})

    return make


_cpp_device_of = torch._C.TensorBase.device.__get__


def _device(tensor: torch.Tensor) -> torch.device:
    device: torch.device = _cpp_device_of(tensor)
    if device.type == gpus.CPP_DEVICE_TYPE:
        return torch.device(gpus.DEVICE_TYPE, device.index)
    return device


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to``; C++ compares devices there, so it must get the ones it knows."""
    if "device" in kwargs:
        kwargs["device"] = cpp_device(kwargs["device"])
    elif args:
        args = (cpp_device(args[0]), *args[1:])
    return torch.Tensor.to(tensor, *args, **kwargs)


_SHOWING_DEVICE: dict[str, Any] = {"device": property(_device), "to": _to}


def _show_device(cls: type, changes: Changes) -> None:
    for name, attribute in _SHOWING_DEVICE.items():
        if getattr(cls, name) is getattr(torch.Tensor, name):
            changes.set(cls, name, attribute)


def _show_device_of_dtensors(module: ModuleType, changes: Changes) -> None:
    _show_device(module.DTensor, changes)


# Functional collectives


@handler("_c10d_functional::_wrap_tensor_autograd", records_itself=True)
def _wrap_async(func: Operator, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """A result that waits for its collective when it is first used."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


# Random numbers of DTensors


def _read_offset(module: ModuleType, changes: Changes) -> None:
    """DTensor moves a generator's offset between shards; ours stands at the end of its state.

    torch reads the 16 bytes of CUDA's generator: a seed, then an offset.
    """

    class PhiloxState(module._PhiloxState):  # type: ignore[name-defined]
        @property
        def offset(self) -> torch.Tensor:
            if len(self._state) == generators.PHILOX_BYTES:
                offset: torch.Tensor = super().offset
                return offset
            return generators.offset_in(self._state)

        @offset.setter
        def offset(self, offset: torch.Tensor) -> None:
            if len(self._state) == generators.PHILOX_BYTES:
                self._state[8:] = offset.view(torch.uint8)
            else:
                generators.set_offset_in(self._state, int(offset))

    changes.set(module, "_PhiloxState", PhiloxState)
