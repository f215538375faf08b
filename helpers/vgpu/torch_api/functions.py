"""Functions of torch that C++ answers without an operator, so that no dispatch sees them.

A function goes here when it compares or names devices before it calls an operator. What is an
operator (``torch.ops.aten``) belongs in ``dispatch/handlers.py``, a method of a tensor in
``dispatch/tensor.py``, a name of ``torch.vgpu`` in ``device_module.py``, and what virtual GPUs
cannot do in ``dispatch/refusals.py``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from helpers.vgpu.changes import Changes
from helpers.vgpu.device.memory import Block
from helpers.vgpu.dispatch.device_names import naming_devices
from helpers.vgpu.dispatch.tensor import VirtualTensor, cpp_device

# Functions that compare devices in C++ before they reach any kernel.
_CHECK_IN_CPP = (
    (torch._VF, "lstm"),
    (torch._VF, "gru"),
    (torch._VF, "rnn_tanh"),
    (torch._VF, "rnn_relu"),
    (torch, "grid_sampler"),
    (torch, "tensor_split"),
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch.Tensor, "__dlpack__"),
    (torch.Tensor, "new"),
    (torch.nn.functional, "scaled_dot_product_attention"),
    (torch.autograd, "_engine_run_backward"),
)


def install(changes: Changes) -> None:
    _device_constructors()  # torch keeps the list of its first call: it must name torch's own
    changes.wrap(torch, "as_tensor", as_tensor)
    changes.wrap(torch, "asarray", asarray)
    changes.wrap(torch, "ctc_loss", ctc_loss)
    changes.wrap(torch.UntypedStorage, "resize_", resize_storage)
    for owner, name in _CHECK_IN_CPP:
        changes.wrap(owner, name, naming_devices)


def as_tensor(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.as_tensor``; C++ would copy, because it compares its own name of the device."""

    @functools.wraps(plain)
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        if isinstance(data, VirtualTensor):
            return data.to(device=device or _default_device() or data.device, dtype=dtype)
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


def _default_device() -> torch.device | None:
    """The device of ``torch.set_default_device`` or ``with torch.device(...)``; None without."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None
