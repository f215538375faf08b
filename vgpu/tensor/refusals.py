"""Raise clear errors for unsupported features, and for operands on different devices.

C++ would raise an obscure error, or crash.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from vgpu.memory import gpus
from vgpu.tensor.operators import (
    INDEXING,
    Args,
    Kwargs,
    Operator,
    OperatorInfo,
    handler,
    named_arguments,
)
from vgpu.torch_patches.undo import Changes

_NESTED = (
    "nested tensors are not supported on virtual GPUs: pad the tensors to the same size "
    "(torch.nn.utils.rnn.pad_sequence), or keep the nested tensor on the CPU"
)
_NESTED_ENCODER = (
    "in evaluation mode, without gradients and with src_key_padding_mask, nn.TransformerEncoder "
    "converts its input to a nested tensor, and nested tensors are not supported on virtual GPUs: "
    "create the encoder with enable_nested_tensor=False. Ignore its output at padded positions, "
    "where a nested tensor leaves zeros; elsewhere, it is the same"
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
    """Raise RuntimeError for a mix of parameter and statistics dtypes that CUDA has no backward for.

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


# Operands on different devices: CUDA's checks and error messages
#
# Only calls that mix GPUs, or a GPU and the CPU, are checked. On CUDA, three kinds of code do this:
# TensorIterator for elementwise operators, generated code for most others, and the indexing code
# itself. Operators marked ``device_check: NoCheck`` in native_functions.yaml do their own checks,
# or accept operands on other devices; they're listed below.


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def check_same_device(info: OperatorInfo, args: Args, kwargs: Kwargs) -> None:
    """Raise CUDA's RuntimeError if the operands of a call are on devices that can't be mixed."""
    _check_hosts(info.func, args, kwargs)
    check_of(info.func)(info.func, args, kwargs)


def check_of(func: Operator) -> Callable[[Operator, Args, Kwargs], None]:
    """Return the function below that checks an operator as CUDA does."""
    if func._schema.name in INDEXING:
        return _check_indexing
    if _is_elementwise(func):
        return _check_elementwise
    if func._schema.name == "aten::convolution":
        return _check_convolution
    if func._schema.name in _WITH_SCALAR and func._schema.overload_name == "Tensor":
        return _check_scalar
    return check_generated


def _is_elementwise(func: Operator) -> bool:
    """Whether TensorIterator runs the operator; some in-place variants lack torch's tag."""
    if torch.Tag.pointwise in func.tags or func._schema.name in _ELEMENTWISE:
        return True
    name, overload = func._schema.name.partition("::")[2], func._schema.overload_name
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
    sibling = getattr(plain, overload or "default", None)
    return sibling is not None and torch.Tag.pointwise in sibling.tags


# Operators that TensorIterator runs, or composites of such operators, that lack torch's tag for it.
_ELEMENTWISE = {
    f"aten::{name}"
    for name in (
        "__ilshift__",
        "__irshift__",
        "binary_cross_entropy_with_logits",
        "dist",
        "fill",
        "fill_",
        "floor_divide",
        "floor_divide_",
        "isin",
        "lerp",
        "lerp_",
        "masked_fill",
        "masked_fill_",
        "rsub",
        "where",
    )
}
# These operators' kernels accept a scalar on the CPU
# (ATen/native/cuda/ForeachBinaryOpScalarTensor.cu).
_WITH_SCALAR = {f"aten::_foreach_{name}" for name in ("div", "div_", "mul", "mul_")}


def _check_hosts(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Reject mixing a cluster's GPUs with those outside its block, which have the same names."""
    gpus: dict[torch.device, object] = {}
    for name, tensor in _named_tensors(func, args, kwargs):
        gpu = getattr(tensor, "_gpu", None)
        if gpu is not None and gpus.setdefault(tensor.device, gpu) is not gpu:
            raise RuntimeError(
                f"{func._schema.name} got tensors from two hosts: {name}, of size "
                f"{list(tensor.size())}, is on {tensor.device}, and so is another tensor, but one "
                "of the two was created before a vgpu.cluster block, or in one that has ended. "
                "Create both in the block, or move one into it through the host: x.cpu().to(...)"
            )


def _check_elementwise(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Accept CPU scalars among tensors on any device, but not as outputs.

    The common device is that of the first operand that isn't on the CPU.
    """
    written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    named = list(_named_tensors(func, args, kwargs))
    common = next(tensor.device for _, tensor in named if tensor.device.type != "cpu")
    for name, tensor in named:
        if tensor.device != common and (name in written or not _is_cpu_scalar(tensor)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, "
                f"but found at least two devices, {common} and {tensor.device}!"
            )


def check_generated(func: Operator, args: Args, kwargs: Kwargs) -> None:
    common = None
    for name, tensor in _named_tensors(func, args, kwargs):
        if name in _MAY_BE_ON_CPU and tensor.device.type == "cpu":
            continue
        if common and common.type != "cpu" and name == _ANYWHERE.get(func._schema.name):
            continue
        common = common or tensor.device
        if tensor.device != common:
            name, method = _names_in_cuda(func, name)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {name} is on "
                f"{tensor.device}, different from other tensors on {common} "
                f"(when checking argument in method wrapper_VGPU_{method})"
            )


def _check_convolution(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Compare tensor types first, as convolution does; they don't distinguish between GPUs."""
    tensor = args[0]
    for name, other in _named_tensors(func, args, kwargs):
        if other.device.type != tensor.device.type:
            mkldnn = " or input should be a MKLDNN tensor and weight is a dense tensor"
            raise RuntimeError(
                f"Input type ({tensor.type()}) and {name} type ({other.type()}) should be the same"
                f"{mkldnn if name == 'weight' and tensor.device.type == 'cpu' else ''}"
            )
    check_generated(func, args, kwargs)


def _check_indexing(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Accept indices on the CPU, and a value on the CPU if it's a scalar."""
    tensor = args[0]
    for name, other in _named_tensors(func, args[1:], kwargs, skip=1):
        if other.device == tensor.device or _is_cpu_scalar(other):
            continue
        if name == "indices" and other.device.type != "cpu":
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({tensor.device})"
            )
        if name != "indices":
            raise RuntimeError(
                "Expected all tensors to be on the same device, "
                f"but found at least two devices, {tensor.device} and {other.device}!"
            )


def _check_scalar(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Check the scalar for a list of tensors on one GPU; other lists run tensor by tensor."""
    tensor, scalar = args[0][0], args[1]
    if not _is_cpu_scalar(scalar):
        verb = "is expected" if func._schema.name.endswith("_") else "expected"
        raise RuntimeError(
            f"scalar tensor {verb} to be on {tensor.device} but is on {scalar.device}"
        )


# Arguments that the host reads: lengths of packed sequences, the learning rate of fused optimizers,
# and the factors of _foreach_addcmul.
_MAY_BE_ON_CPU = {"lengths", "batch_sizes", "lr", "scalars"}

# The argument that the kernel copies to its GPU, or reads on the host, whatever device it's on.
_ANYWHERE = {
    "aten::as_strided_scatter": "src",
    "aten::bernoulli_": "p",
    "aten::diagonal_scatter": "src",
    "aten::index_fill": "value",
    "aten::index_fill_": "value",
    "aten::select_scatter": "src",
    "aten::slice_scatter": "src",
}

# For composite operators, the argument and the underlying operator that CUDA's check names.
_BELOW = {
    "aten::embedding": ({"indices": "index", "weight": "self"}, "_index_select"),
    "aten::stack": ({}, "cat"),
    "aten::convolution": ({}, "_cudnn_convolution"),
}


def _names_in_cuda(func: Operator, argument: str) -> tuple[str, str]:
    """Return the argument's and operator's names in the message from the generated check.

    torchgen writes ``overload_name`` for plain kernels and ``name_overload`` for structured ones.
    """
    if func._schema.name in _BELOW:
        arguments, method = _BELOW[func._schema.name]
        return arguments.get(argument, argument), method
    name, overload = func._schema.name.partition("::")[2], func._schema.overload_name
    if any(a.is_out for a in func._schema.arguments):
        name += "_out"
    if _has_kernel(func.name(), "CompositeExplicitAutogradNonFunctional"):  # a structured kernel
        return argument, f"{name}_{overload}" if overload else name
    return argument, f"{overload}_{name}"


def _is_cpu_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _named_tensors(
    func: Operator, args: Args, kwargs: Kwargs, skip: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in ``args``, which omits the first ``skip``, with its parameter's name."""
    for position, argument in enumerate(func._schema.arguments[skip:]):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield argument.name, item
