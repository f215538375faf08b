"""Functions of torch that C++ answers without an operator, so that no dispatch sees them.

A function goes here when it compares or names devices, or asks for a tensor's class, before it calls
an operator. An operator (``torch.ops.aten``) or a method of a tensor belongs in ``vgpu/tensor``, a name
of ``torch.vgpu`` in ``device_module.py``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.clip_grad
import torch.utils._foreach_utils
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._device import _device_constructors

from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.tensor import autocast as casting
from vgpu.tensor.methods import cpp_device, naming_devices
from vgpu.tensor.tensor import VirtualTensor
from vgpu.torch_patches.undo import Changes

# What compares devices in C++ before it reaches any kernel: functions that classes and modes may
# override (__torch_function__), and the rest.
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CHECK_IN_CPP = ("grid_sampler", "tensor_split")
_ALSO_IN_CPP = (
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch.Tensor, "__dlpack__"),
    (torch.Tensor, "new"),
    (torch.autograd, "_engine_run_backward"),
)


def install(changes: Changes) -> None:
    constructors = _device_constructors()  # torch keeps the list of its first call
    for name, make in (("as_tensor", as_tensor), ("asarray", asarray)):
        changes.wrap_function(name, make, torch, for_classes=False)
        changes.add(constructors, getattr(torch, name))
    changes.wrap_function("ctc_loss", ctc_loss, torch)
    changes.wrap(torch.UntypedStorage, "resize_", resize_storage)
    for lazy in (UninitializedParameter, UninitializedBuffer):
        changes.wrap(lazy, "__new__", without_size)
    for name in _CHECK_IN_CPP:
        changes.wrap_function(name, naming_devices, torch, torch._VF)
    for name in _RECURRENT:
        changes.wrap_function(name, recurrent, torch, torch._VF)
    for owner, name in _ALSO_IN_CPP:
        changes.wrap(owner, name, naming_devices)
    changes.append(_foreach_supported_types, VirtualTensor)  # tensor/shapes.py has that of shapes
    for owner in (torch.utils._foreach_utils, torch.nn.utils.clip_grad):
        changes.wrap(owner, "_has_foreach_support", _of_plain_tensors)
    changes.wrap(torch._C, "_group_tensors_by_device_and_dtype", _grouping_by_name)


def recurrent(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.lstm`` and its kind: the cast of autocast, and the check in C++."""
    return casting.recurrent(naming_devices(plain))


def as_tensor(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.as_tensor``; C++ would copy, because it compares its own name of the device."""

    @functools.wraps(plain)
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        if isinstance(data, VirtualTensor):
            return data.to(device=data.device if device is None else device, dtype=dtype)
        return plain(data, dtype=dtype, device=device)

    return as_tensor


def asarray(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.asarray``, for the same reason."""
    named = naming_devices(plain)

    @functools.wraps(plain)
    def asarray(obj: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if isinstance(obj, VirtualTensor) and cpp_device(device) == obj._gpu.cpp_device:
            device = obj._gpu.cpp_device
        return named(obj, device=device, **options)

    return asarray


def ctc_loss(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.ctc_loss``; C++ reads lengths that lie on the CPU only for tensors of its own."""

    @functools.wraps(plain)
    def ctc_loss(log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> torch.Tensor:
        if isinstance(log_probs, VirtualTensor):
            lengths = tuple(x.tolist() if isinstance(x, torch.Tensor) else x for x in lengths)
        return plain(log_probs, targets, *lengths, **options)

    return ctc_loss


def resize_storage(
    plain: Callable[..., torch.UntypedStorage],
) -> Callable[..., torch.UntypedStorage]:
    """``UntypedStorage.resize_``, which the bytes of a virtual GPU follow."""

    @functools.wraps(plain)
    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
        block: Block | None = getattr(storage, "_vgpu_block", None)
        if block is not None:
            block.resize(size_bytes, "resize_")  # first: it may not fit
        return plain(storage, size_bytes)

    return resize_


def without_size(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``__new__`` of a lazy module's parameters and buffers: RuntimeError for a virtual GPU.

    To move such a module there, torch itself refuses: "Attempted to use an uninitialized parameter".
    """

    @functools.wraps(plain)
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = torch.empty(0, device=kwargs.get("device")).device
        if gpus.resolve(device) is not None:
            raise RuntimeError(
                f"a lazy module cannot be made on {device}, a virtual GPU: make it on the CPU, call "
                "forward with a batch there, which gives its parameters their size, then move it"
            )
        return plain(cls, *args, **kwargs)

    return __new__


# Optimizers and clipping have a loop and a form of ``torch._foreach_*``. Unless told, they take the
# latter on a GPU, and only for tensors of the classes that they know.


def _of_plain_tensors(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Whether tensors are of a class for which torch takes ``foreach`` by itself.

    Here it takes plain tensors, such as gradients, and no Parameter; a virtual one of either is a
    VirtualTensor.
    """

    @functools.wraps(plain)
    def _has_foreach_support(tensors: list[Any], device: torch.device) -> bool:
        others = [tensor for tensor in tensors if not _is_plain(tensor)]
        return plain(others, device)

    return _has_foreach_support


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, VirtualTensor) and not isinstance(tensor, nn.Parameter)


def _grouping_by_name(plain: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
    """What the ``foreach`` forms ask first; C++ sorts tensors by its own name of a device."""

    @functools.wraps(plain)
    def grouped(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        groups = plain(*args, **kwargs)
        return {(_named(device), dtype): group for (device, dtype), group in groups.items()}

    return grouped


def _named(device: torch.device | None) -> torch.device | None:
    if device is not None and device.type == gpus.CPP_DEVICE_TYPE:
        return torch.device(gpus.DEVICE_TYPE, device.index)
    return device
