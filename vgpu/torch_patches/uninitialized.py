"""Parameters and buffers of lazy modules, whose size is not known before the first batch.

To C++ such a tensor is an empty one on the CPU, whichever GPU it is for: it has nothing to lie
there. Once it has a size, it becomes a tensor of that GPU like any other.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import (  # type: ignore[attr-defined]
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,
)
from torch.utils._python_dispatch import _disable_current_modes

from vgpu.changes import Changes
from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.tensor import set_cpp_data


def install(changes: Changes) -> None:
    for kind in _HERE:
        changes.wrap(kind, "__new__", new_for_gpu)
    changes.set(UninitializedTensorMixin, "materialize", materialize)
    changes.set(UninitializedTensorMixin, "to", to)
    to_gpu = getattr(torch.Tensor, gpus.DEVICE_TYPE)  # as Tensor.cuda is allowed
    allowed = [*UninitializedTensorMixin._allowed_methods, to_gpu]
    changes.set(UninitializedTensorMixin, "_allowed_methods", allowed)


def to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``to`` of an uninitialized tensor: a parameter gives an empty tensor, a buffer a buffer."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or self.device, dtype or self.dtype
    if gpus.resolve(device) is None and not is_on_gpu(self):
        return torch.Tensor.to(self, *args, **kwargs)
    if device == self.device and dtype is self.dtype:
        return self
    if isinstance(self, UninitializedBuffer):
        return UninitializedBuffer(self.requires_grad, device, dtype)  # type: ignore[arg-type]
    return torch.empty(0, device=device, dtype=dtype)


class _ForGPU:
    """What an uninitialized tensor for a virtual GPU says of itself, and how it leaves."""

    _gpu: VirtualGPU
    requires_grad: bool

    @property
    def device(self) -> torch.device:
        return self._gpu.device

    def get_device(self) -> int:
        return self._gpu.index

    to = to
    cpu = functools.partialmethod(to, "cpu")
    half = functools.partialmethod(to, torch.float16)
    float = functools.partialmethod(to, torch.float32)
    double = functools.partialmethod(to, torch.float64)

    def __reduce_ex__(self, proto: object) -> tuple[type, tuple[bool]]:
        return _kind_of(self), (self.requires_grad,)  # as torch's own: no device


class _ParameterForGPU(_ForGPU, UninitializedParameter):  # type: ignore[override]
    pass


class _BufferForGPU(_ForGPU, UninitializedBuffer):  # type: ignore[override]
    pass


_HERE: dict[type, type] = {
    UninitializedParameter: _ParameterForGPU,
    UninitializedBuffer: _BufferForGPU,
}
for kind, here in _HERE.items():
    here.__name__ = kind.__name__  # what prints and errors name


def _kind_of(tensor: object) -> type:
    """torch's own class of an uninitialized tensor."""
    return next(kind for kind in _HERE if isinstance(tensor, kind))


def new_for_gpu(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``__new__`` of an uninitialized tensor, for whose empty contents C++ needs a device it has."""
    signature = inspect.signature(plain)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(cls, *args, **kwargs).arguments
        gpu = gpus.resolve(torch.empty(0, device=given.get("device")).device)
        if gpu is None:
            return plain(cls, *args, **kwargs)
        with _disable_current_modes():  # in shapes_only() the contents would be a shape
            return move(plain(**{**given, "device": "cpu"}), gpu)

    return __new__


def is_uninitialized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, UninitializedTensorMixin)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _ForGPU)


def assign(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """``tensor.data = source``, with which a lazy module moves and changes its type."""
    move(tensor, gpus.resolve(source.device))
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        set_cpp_data(tensor, torch.empty(0, device="cpu", dtype=source.dtype))


def move(tensor: Any, gpu: VirtualGPU | None) -> Any:
    """Put an uninitialized tensor on ``gpu``, or back on the CPU; returns it."""
    kind = _kind_of(tensor)
    if gpu is None:
        tensor.__class__ = kind
        vars(tensor).pop("_gpu", None)
    else:
        tensor.__class__ = _HERE[kind]
        tensor._gpu = gpu
    return tensor


def materialize(
    self: Any,
    shape: tuple[int, ...],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """``UninitializedTensorMixin.materialize``: an uninitialized tensor gets its size.

    torch's own changes the class last, when ``.data`` may already have made it a virtual tensor.
    """
    values = torch.empty(shape, device=device or self.device, dtype=dtype or self.dtype)
    kind = self.cls_to_become
    move(self, None).__class__ = kind
    self.data = values
