"""Norms as CUDA has them: layer, batch, RMS and synchronized batch norm.

The CPU keeps the statistics of float16 and bfloat16 in the input's type, CUDA in float32:
``toAccumulateType(..., is_cuda=true)`` says so, in ATen/native/cuda/layer_norm_kernel.cu and
Normalization.cu. Group norm is not here: there CUDA keeps the input's type, too.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from vgpu.tensor.cuda_kernels import HALF, widened
from vgpu.tensor.operator_info import handler
from vgpu.tensor.operators import Args, Kwargs, Operator, named_arguments
from vgpu.tensor.refusals import refuse_mixed_batch_norm, refuse_mixed_layer_norm
from vgpu.tensor.tensor import run, run_unrecorded, wrap_result
from vgpu.torch_patches.undo import Changes


@handler("aten::native_layer_norm")
def layer_norm(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    refuse_mixed_layer_norm(func, args, kwargs)
    if kwargs or args[0].dtype not in HALF:  # out=
        return run_unrecorded(func, args, kwargs)
    named, gpu = widened(func, args, kwargs)
    output, *statistics = func(**named)
    return wrap_result((output.to(args[0].dtype), *statistics), gpu, "native_layer_norm")


@handler("aten::native_layer_norm_backward")
def layer_norm_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    if kwargs or named["input"].dtype not in HALF:
        return run_unrecorded(func, args, kwargs)
    types = [getattr(named[name], "dtype", None) for name in ("input", "weight", "bias")]
    named, gpu = widened(func, args, kwargs)
    return wrap_result(_each_to(types, func(**named)), gpu, "native_layer_norm_backward")


@handler("aten::native_batch_norm")
def batch_norm(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """In evaluation CUDA hands the running statistics on, in float32; the CPU hands on nothing."""
    named = named_arguments(func, args, kwargs)
    dtype, training = named["input"].dtype, named["training"]
    if kwargs or (training and dtype not in HALF):
        return run_unrecorded(func, args, kwargs)
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


@handler("aten::native_batch_norm_backward")
def batch_norm_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    refuse_mixed_batch_norm(func, args, kwargs)
    named = named_arguments(func, args, kwargs)
    if kwargs or named["input"].dtype not in HALF:
        return run_unrecorded(func, args, kwargs)
    of_weight = torch.float32 if named["weight"] is None else named["weight"].dtype
    types = [named["input"].dtype, of_weight, of_weight]
    named, gpu = widened(func, args, kwargs)
    return wrap_result(_each_to(types, func(**named)), gpu, "native_batch_norm_backward")


def _each_to(types: list[Any], gradients: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(
        None if gradient is None else gradient.to(dtype)
        for dtype, gradient in zip(types, gradients, strict=True)
    )


# RMSNorm: one kernel forward and one backward, which keep one number a row. Elsewhere torch makes it
# of six operations. The values here are theirs, the bytes and the kernels CUDA's. Double backward
# comes from torch's own formula.

_RMS_NORM = torch.ops.aten._fused_rms_norm.default


def register(kernels: torch.library.Library) -> None:
    """Say that our devices have the kernel: autograd then calls it, and not its parts."""
    kernels.impl(_RMS_NORM, lambda *args: run(_RMS_NORM, args, {}), "Lazy")


def _rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Any, Any]:
    """The gradients of the input and of the weight, each in its own type; computed in float32."""
    wide = torch.float64 if input.dtype is torch.float64 else torch.float32
    rows = tuple(range(input.dim() - len(normalized_shape)))
    within = tuple(range(len(rows), input.dim()))
    rstd = rstd.to(wide).reshape(*input.shape[: len(rows)], *[1] * len(within))
    grad, normal = grad_out.to(wide), input.to(wide) * rstd
    of_input = of_weight = None
    if output_mask[0]:
        inner = grad if weight is None else grad * weight.to(wide)
        along = (inner * normal).mean(within, keepdim=True) if math.prod(normalized_shape) else 0
        of_input = ((inner - normal * along) * rstd).to(input.dtype).contiguous()
    if output_mask[1] and weight is not None:
        of_weight = (grad * normal).sum(rows) if rows else grad * normal
        of_weight = of_weight.to(weight.dtype)
    return of_input, of_weight


# Without a handler, the forward pass would be taken for a composite operator, and run in parts.
@handler("aten::_fused_rms_norm")
def rms_norm(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    return run_unrecorded(func, args, kwargs)


# The five operators behind nn.SyncBatchNorm, which torch has for GPUs only, on CPU tensors. What is
# gathered over the ranks, and when, is torch's own (torch.nn.modules._functions). These do what its
# CUDA kernels do (ATen/native/cuda/Normalization.cuh), each in its formula: statistics of the rank's
# own part, the statistics of all parts together, the normalization, and the two halves of the
# backward pass. ``C`` is the number of channels, dimension 1 of the input. Statistics and sums of
# float16 and bfloat16 are float32, as there; outputs and gradients have their tensor's type.

Optional = torch.Tensor | None


def _sync_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / sqrt(variance + eps) of this rank's part, each (C,)."""
    input, others = _wide(input), _all_but_channels(input)
    return input.mean(others), (input.var(others, correction=0) + eps).rsqrt()


def _sync_gather_stats(
    input: torch.Tensor,
    mean: torch.Tensor,  # (ranks, C)
    invstd: torch.Tensor,  # (ranks, C)
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    eps: float,
    counts: torch.Tensor,  # (ranks,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / sqrt(variance + eps) over all ranks; the running statistics move towards them."""
    mean, invstd, counts = _wide(mean), _wide(invstd), _wide(counts)
    share = (counts / counts.sum())[:, None]
    whole = (share * mean).sum(0)
    variance = (share * (invstd.square().reciprocal() - eps + (mean - whole).square())).sum(0)
    if running_mean is not None:
        running_mean.copy_(_wide(running_mean).lerp(whole, momentum))
    if running_var is not None:
        unbiased = variance * counts.sum() / (counts.sum() - 1)
        running_var.copy_(_wide(running_var).lerp(unbiased, momentum))
    return whole, (variance + eps).rsqrt()


def _sync_normalize(
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    scale = invstd if weight is None else invstd * weight
    out = (_wide(input) - _along_channels(mean, input)) * _along_channels(scale, input)
    out = out if bias is None else out + _along_channels(bias, input)
    return out.to(input.dtype)


def _sync_backward_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Optional,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's sums of dy and of dy * (x - mean), and its gradients of weight and bias."""
    others, grad_out = _all_but_channels(input), _wide(grad_out)
    sum_dy = grad_out.sum(others)
    sum_dy_xmu = (grad_out * (input - _along_channels(mean, input))).sum(others)
    own = sum_dy.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(own), sum_dy.to(own, copy=True)


def _sync_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Optional,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the input, from the sums over all ranks."""
    samples = count.sum()
    centred = input - _along_channels(mean, input)
    slope = _along_channels(invstd.square() * sum_dy_xmu / samples, input)
    scale = invstd if weight is None else invstd * weight
    away = grad_out - _along_channels(sum_dy / samples, input) - centred * slope
    return (away * _along_channels(scale, input)).to(input.dtype)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """float16 and bfloat16 as float32: what a GPU computes them in."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _along_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) as (1, C, 1, ...), with as many dimensions as ``like``."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def install(changes: Changes) -> None:
    """Give the CPU and shapes what torch has for GPUs only, as long as there are virtual GPUs."""
    kernels = changes.library("aten")
    for key in ("CPU", "Meta"):
        kernels.impl("_fused_rms_norm_backward", _rms_norm_backward, key)
    kernels.impl("batch_norm_stats", _sync_stats, "CPU")
    kernels.impl("batch_norm_gather_stats_with_counts", _sync_gather_stats, "CPU")
    kernels.impl("batch_norm_elemt", _sync_normalize, "CPU")
    kernels.impl("batch_norm_backward_reduce", _sync_backward_reduce, "CPU")
    kernels.impl("batch_norm_backward_elemt", _sync_backward, "CPU")
