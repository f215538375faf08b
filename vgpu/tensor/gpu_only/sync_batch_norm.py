"""The five operators behind nn.SyncBatchNorm, which torch has for GPUs only, on CPU tensors.

What is gathered over the ranks, and when, is torch's own (torch.nn.modules._functions). These do
what its CUDA kernels do (ATen/native/cuda/Normalization.cuh), each in its formula: statistics of
the rank's own part, the statistics of all parts together, the normalization, and the two halves of
the backward pass. ``C`` is the number of channels, dimension 1 of the input. Statistics and sums of
float16 and bfloat16 are float32, as there; outputs and gradients have their tensor's type.
"""

import torch

from vgpu.torch_patches.undo import Changes

Optional = torch.Tensor | None


def install(changes: Changes) -> None:
    """Give the CPU these operators for as long as there are virtual GPUs."""
    kernels = changes.library("aten")
    kernels.impl("batch_norm_stats", _stats, "CPU")
    kernels.impl("batch_norm_gather_stats_with_counts", _gather_stats, "CPU")
    kernels.impl("batch_norm_elemt", _normalize, "CPU")
    kernels.impl("batch_norm_backward_reduce", _backward_reduce, "CPU")
    kernels.impl("batch_norm_backward_elemt", _backward, "CPU")


def _stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / sqrt(variance + eps) of this rank's part, each (C,)."""
    input, others = _wide(input), _all_but_channels(input)
    return input.mean(others), (input.var(others, correction=0) + eps).rsqrt()


def _gather_stats(
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


def _normalize(
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


def _backward_reduce(
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


def _backward(
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
