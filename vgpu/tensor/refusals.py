"""Raise clear errors for unsupported features before C++ raises an obscure one or crashes."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from vgpu.memory import gpus
from vgpu.tensor.operator_info import handler
from vgpu.tensor.operators import Args, Kwargs, Operator, named_arguments
from vgpu.torch_patches.undo import Changes

_NESTED = (
    "nested tensors are not supported on virtual GPUs: pad the tensors to the same size "
    "(torch.nn.utils.rnn.pad_sequence), or keep the nested tensor on the CPU"
)
_NESTED_ENCODER = (
    "in evaluation mode, without gradients and with src_key_padding_mask, nn.TransformerEncoder "
    "converts its input to a nested tensor, and nested tensors are not supported on virtual GPUs: "
    "create the encoder with enable_nested_tensor=False. Ignore its output at padded positions, "
    "where a nested tensor leaves zeros; elsewhere it is the same"
)
_QUANTIZED = "quantized tensors are not supported on virtual GPUs: quantize on the CPU"
_FORWARD_MODE = (
    "forward-mode automatic differentiation is not supported on virtual GPUs: "
    "use backward(), or tensors on the CPU"
)
_VARLEN = (
    "variable-length attention (torch.nn.attention.varlen) is not supported on virtual GPUs: call "
    "torch.nn.functional.scaled_dot_product_attention for each sequence, or flex_attention with a "
    "document mask"
)
_SPARSE_REDUCE = (
    "PyTorch supports torch.sparse.mm with a reduction only on the CPU, even with real GPUs: call "
    "it on CPU tensors, or without reduce"
)
_SYMMETRIC = (
    "operators that use symmetric memory (torch.ops.symm_mem) are not supported on virtual GPUs: "
    "call the collective, such as torch.distributed.all_gather_into_tensor, and then torch.matmul"
)
_STORAGE = (
    "a storage alone cannot be created on or moved to a virtual GPU: create a tensor there, such "
    "as torch.empty(n, dtype=torch.uint8, device='vgpu:0')"
)

# Operators that create an unsupported kind of tensor, or that need a CUDA or CPU kernel.
_REFUSED = {
    "aten::_flash_attention_forward": _VARLEN,
    "aten::_nested_tensor_from_mask": _NESTED_ENCODER,
    "aten::_nested_tensor_from_tensor_list": _NESTED,
    "aten::_nested_view_from_buffer": _NESTED,
    "aten::_nested_view_from_jagged": _NESTED,
    "aten::_sparse_mm_reduce_impl": _SPARSE_REDUCE,
    "aten::quantize_per_channel": _QUANTIZED,
    "aten::quantize_per_tensor": _QUANTIZED,
    "aten::quantize_per_tensor_dynamic": _QUANTIZED,
    "symm_mem::_low_contention_all_gather": _SYMMETRIC,
    "symm_mem::_low_contention_reduce_scatter": _SYMMETRIC,
    "symm_mem::fused_all_gather_matmul": _SYMMETRIC,
    "symm_mem::fused_all_gather_scaled_matmul": _SYMMETRIC,
    "symm_mem::fused_matmul_reduce_scatter": _SYMMETRIC,
    "symm_mem::fused_scaled_matmul_reduce_scatter": _SYMMETRIC,
}


def _refusing(message: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(message)

    return refuse


for _name, _message in _REFUSED.items():
    handler(_name)(_refusing(_message))
# Dispatch keys that are reached when such a tensor is moved from the CPU.
FALLBACKS = {
    "NestedTensorPrivateUse1": _refusing(_NESTED),
    "QuantizedPrivateUse1": _refusing(_QUANTIZED),
}


def install(changes: Changes) -> None:
    changes.wrap(torch.Tensor, "_make_wrapper_subclass", make_wrapper_subclass)
    changes.wrap(torch.nested, "nested_tensor", refusing_virtual(_NESTED))
    changes.wrap(torch.UntypedStorage, "__new__", refusing_virtual(_STORAGE))  # C++ would crash
    changes.wrap(forward_ad, "make_dual", refusing_virtual(_FORWARD_MODE))
    changes.set(torch.UntypedStorage, gpus.DEVICE_TYPE, storage_to_gpu)


def is_virtual_device(device: object) -> bool:
    """Whether a torch.device or a string refers to a virtual GPU."""
    kind = device.partition(":")[0] if isinstance(device, str) else getattr(device, "type", None)
    return kind in (gpus.DEVICE_TYPE, gpus.CPP_DEVICE_TYPE)


def refusing_virtual(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper for functions that can't handle virtual GPUs, or tensors on them."""

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def refuse_virtual(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if is_virtual_device(getattr(value, "device", value)):
                    raise NotImplementedError(message)
            return plain(*args, **kwargs)

        return refuse_virtual

    return wrap


def storage_to_gpu(storage: torch.UntypedStorage, device: Any = None) -> torch.UntypedStorage:
    """Run ``storage.vgpu(index)``, which is only allowed in ``map_location`` functions."""
    if torch.serialization._serialization_tls.map_location is None:
        raise NotImplementedError(_STORAGE)
    index = gpus.current_index() if device is None else torch._utils._get_device_index(device)
    storage._vgpu_home = gpus.by_index(index)  # type: ignore[attr-defined]
    return storage


def make_wrapper_subclass(
    plain: Callable[..., torch.Tensor],
) -> "staticmethod[..., torch.Tensor]":
    """Wrap ``torch.Tensor._make_wrapper_subclass`` to reject nested tensors on virtual GPUs.

    A jagged tensor is a Python class around its values; C++ autograd has no queue for its device.
    """
    nested = refusing_virtual(_NESTED)(plain)

    def _make_wrapper_subclass(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_nested = cls.__module__.startswith("torch.nested")
        return (nested if is_nested else plain)(cls, *args, **kwargs)

    return staticmethod(_make_wrapper_subclass)


def subclass_refused(cls: type) -> NotImplementedError:
    """Return the error for a tensor of a user-defined subclass on a virtual GPU."""
    return NotImplementedError(
        f"tensors of the subclass {cls.__name__} are not supported on virtual GPUs: use plain "
        "tensors there, or a class with a tensor as an attribute (torch.Tensor.as_subclass "
        "and the like work on the CPU)"
    )


_excluding = torch._C._SetExcludeDispatchKeyGuard
_AUTOGRAD = torch._C.DispatchKey.AutogradCPU
_IN_PLACE = torch._C.DispatchKey.ADInplaceOrView


def refuse_tangents(values: Iterable[object]) -> None:
    """Raise an error if a CPU tensor with a tangent is moved to a GPU: C++ would crash later.

    The tangents of torch.func.jvp aren't visible here, so nothing can be moved inside it.
    """
    level = forward_ad._current_level
    if level < 0:
        return
    if eager_transforms.JVP_NESTING:
        raise NotImplementedError(_FORWARD_MODE)
    for value in values:
        if isinstance(value, list | tuple):
            refuse_tangents(value)
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu":
            # This runs below autograd, where C++ wouldn't look for a tangent.
            with _excluding(_AUTOGRAD, False), _excluding(_IN_PLACE, False):
                _, tangent = torch._VF._unpack_dual(value, level=level)
            if tangent is not None:
                raise NotImplementedError(_FORWARD_MODE)


_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default


def refuse_mixed_norm(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Raise RuntimeError if ``func`` is a norm of mixed dtypes that no CUDA kernel supports."""
    if func is _LAYER_NORM:
        _refuse_mixed_layer_norm(func, args, kwargs)
    elif func is _BATCH_NORM_BACKWARD:
        _refuse_mixed_batch_norm(func, args, kwargs)


def _refuse_mixed_layer_norm(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Raise RuntimeError if weight or bias has a different dtype than the input, as on CUDA.

    If there are no rows to normalize, CUDA launches no kernel and raises no error.
    """
    named = named_arguments(func, args, kwargs)
    input, shape = named["input"], named["normalized_shape"]
    for name in ("weight", "bias"):
        other = named[name]
        if other is not None and other.dtype is not input.dtype:
            if math.prod(input.shape[: input.dim() - len(shape)]) == 0:
                return
            raise RuntimeError(
                f"expected scalar type {_NAMES.get(input.dtype, input.dtype)} but found "
                f"{_NAMES.get(other.dtype, other.dtype)}. On a GPU, layer norm's {name} must "
                f"have the input's dtype: the input is {input.dtype}, the {name} is {other.dtype}. "
                "Convert one of them, or use torch.autocast"
            )


def _refuse_mixed_batch_norm(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Raise RuntimeError if CUDA's backward kernel requires other parameter and statistics dtypes.

    The kernel is compiled for float32 parameters and statistics if the first of them, usually the
    weight, has a different dtype than the input, and otherwise for the input's dtype
    (``is_mixed_type`` in ATen/native/cuda/Normalization.cu). The channels-last kernels, also used
    for (N, C), don't read running statistics.
    """
    named = named_arguments(func, args, kwargs)
    input, (of_input, *of_parameters) = named["input"], named["output_mask"]
    channels_last = _CHANNELS_LAST.get(input.dim())
    if (input.is_contiguous() and input.stride(1) == 1) or (
        channels_last is not None and input.is_contiguous(memory_format=channels_last)
    ):
        return
    if not of_input or not (named["train"] or any(of_parameters)):
        return
    names = ("weight", "running_mean", "running_var")
    dtypes = {name: named[name].dtype for name in names if named[name] is not None}
    expected = input.dtype
    if next(iter(dtypes.values()), expected) is not expected and expected is not torch.float64:
        expected = torch.float32
    for name, dtype in dtypes.items():
        if dtype is not expected:
            raise RuntimeError(
                f"Expected {name} to have type {_NAMES.get(expected, expected)} but got "
                f"{_NAMES.get(dtype, dtype)}. On a GPU, batch norm's parameters and running "
                f"statistics must share one dtype, the input's or float32; the input is "
                f"{input.dtype}"
            )


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_NAMES = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}
