"""Statistics of layer and batch norm in float32 for float16 and bfloat16, as CUDA's kernels keep them.

The CPU keeps them in the input's type. ``toAccumulateType(..., is_cuda=true)`` says CUDA's, in
ATen/native/cuda/layer_norm_kernel.cu and Normalization.cu. Group norm is not here: there CUDA keeps
the input's type, too.
"""

import math
from typing import Any

import torch

from vgpu.tensor.gpu_only.half_types import HALF, widened
from vgpu.tensor.operations import compute, wrap_result
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, named_arguments


def layer_norm(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    refuse_mixed(func, args, kwargs)
    if kwargs or args[0].dtype not in HALF:  # out=
        return compute(func, args, kwargs)
    named, gpu = widened(func, args, kwargs)
    output, *statistics = func(**named)
    return wrap_result((output.to(args[0].dtype), *statistics), gpu, "native_layer_norm")


def refuse_mixed(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """RuntimeError where a weight or bias has another type than the input: CUDA has no such kernel.

    Without a row to normalize it asks for none.
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
                f"{_NAMES.get(other.dtype, other.dtype)}. The {name} of a layer norm must have its "
                f"input's type on a GPU: the input is {input.dtype}, the {name} {other.dtype}. "
                "Convert one of them, or compute under torch.autocast"
            )


_NAMES = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}


def layer_norm_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    if kwargs or named["input"].dtype not in HALF:
        return compute(func, args, kwargs)
    types = [getattr(named[name], "dtype", None) for name in ("input", "weight", "bias")]
    named, gpu = widened(func, args, kwargs)
    return wrap_result(_each_to(types, func(**named)), gpu, "native_layer_norm_backward")


def batch_norm(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """In evaluation CUDA hands the running statistics on, in float32; the CPU hands on nothing."""
    named = named_arguments(func, args, kwargs)
    dtype, training = named["input"].dtype, named["training"]
    if kwargs or (training and dtype not in HALF):
        return compute(func, args, kwargs)
    running = [named["running_mean"], named["running_var"]]
    named, gpu = widened(func, args, kwargs)
    output, *statistics = func(**named)
    wide = [named["running_mean"], named["running_var"]]
    if training:
        for kept, computed in zip(running, wide, strict=True):
            if kept is not None and kept._inner is not computed:
                kept._inner.copy_(computed)
    else:
        mean, var = wide
        statistics = [mean.clone(), (var + named["eps"]).rsqrt()]
    return wrap_result((output.to(dtype), *statistics), gpu, "native_batch_norm")


def batch_norm_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    if kwargs or named["input"].dtype not in HALF:
        return compute(func, args, kwargs)
    of_weight = torch.float32 if named["weight"] is None else named["weight"].dtype
    types = [named["input"].dtype, of_weight, of_weight]
    named, gpu = widened(func, args, kwargs)
    return wrap_result(_each_to(types, func(**named)), gpu, "native_batch_norm_backward")


def _each_to(types: list[Any], gradients: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(
        None if gradient is None else gradient.to(dtype)
        for dtype, gradient in zip(types, gradients, strict=True)
    )


HANDLERS: dict[str, Handler] = {
    "aten::native_layer_norm": layer_norm,
    "aten::native_layer_norm_backward": layer_norm_backward,
    "aten::native_batch_norm": batch_norm,
    "aten::native_batch_norm_backward": batch_norm_backward,
}
