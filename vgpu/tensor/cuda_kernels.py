"""Operators whose CUDA kernels support more dtypes than the CPU's, or return different results.

CPU kernels compute them here, with the dtypes and buffers of the CUDA kernels. In torch, some of
these operators exist only for GPUs: those for RMSNorm, nn.SyncBatchNorm and fused attention.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operators import (
    Args,
    Kwargs,
    Operator,
    decompose,
    handler,
    in_parts,
    named_arguments,
)
from vgpu.tensor.refusals import refuse_mixed_norm
from vgpu.tensor.tensor import named_values, run, run_unrecorded, wrap, wrap_result
from vgpu.torch_patches.undo import Changes

HALF = (torch.float16, torch.bfloat16)


# These operators compute in float32 and round the results. Some have no float16 or bfloat16 kernel
# on the CPU: those with more dtypes in ``dtypesIfCUDA`` than in ``dtypes``, in
# torch/testing/_internal/common_methods_invocations.py. Fourier transforms and float16 ``rrelu``
# also lack one, but they aren't listed here, and raise the CPU's error. For the other operators,
# the CPU keeps statistics in the input's dtype, and CUDA in float32 (``toAccumulateType(...,
# is_cuda=true)`` in ATen/native/cuda/layer_norm_kernel.cu and Normalization.cu). Group norm isn't
# listed, since CUDA also keeps its statistics in the input's dtype.

_INPUT = ("self",)
IN_FLOAT32: dict[str, tuple[str | None, ...]] = {
    "_upsample_bicubic2d_aa": _INPUT,
    "_upsample_bicubic2d_aa_backward": ("grad_output",),
    "_upsample_bilinear2d_aa": _INPUT,
    "_upsample_bilinear2d_aa_backward": ("grad_output",),
    "avg_pool3d": _INPUT,
    "avg_pool3d_backward": _INPUT,
    "multi_margin_loss": _INPUT,
    "multi_margin_loss_backward": _INPUT,
    "multilabel_margin_loss_forward": ("self", "self"),
    "multilabel_margin_loss_backward": _INPUT,
    "native_layer_norm": ("input", None, None),
    "native_layer_norm_backward": ("input", "weight", "bias"),
    "native_batch_norm_backward": ("input", "weight", "weight"),
}
"""For each result, the argument whose dtype it has; None for float32."""


def widened(func: Operator, args: Args, kwargs: Kwargs) -> tuple[dict[str, Any], VirtualGPU]:
    """Return the arguments by name, and their GPU.

    Tensors are on the CPU, with half precision cast to float32.
    """
    named, gpu = named_values(func, args, kwargs)
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.dtype in HALF:
            named[name] = value.float()
    return named, gpu


@handler(*(f"aten::{name}" for name in IN_FLOAT32))
def in_float32(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    refuse_mixed_norm(func, args, kwargs)
    name = func.name().removeprefix("aten::")
    sources = IN_FLOAT32.get(name)  # None for out= variants
    if sources is None or args[0].dtype not in HALF:
        return run_unrecorded(func, args, kwargs)
    given = named_arguments(func, args, kwargs)
    named, gpu = widened(func, args, kwargs)
    results = func(**named)
    alone = isinstance(results, torch.Tensor)
    cast = [
        result
        if result is None
        else result.to(getattr(given.get(source or ""), "dtype", torch.float32))
        for source, result in zip(sources, (results,) if alone else results, strict=True)
    ]
    return wrap_result(cast[0] if alone else tuple(cast), gpu, name)


# On a GPU, softmax of a float16 tensor with a float32 result is one kernel, without a float32 copy
# of the input. It runs for ``softmax(x, dim, dtype=torch.float32)`` and under autocast, for float16
# only (``aten/src/ATen/native/SoftMax.cpp``). C++ calls that kernel only for CUDA tensors.

_SOFTMAX = {
    "aten::softmax.int": torch.ops.aten._softmax.default,
    "aten::log_softmax.int": torch.ops.aten._log_softmax.default,
}


@in_parts(*_SOFTMAX)
def softmax(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run ``softmax.int`` or ``log_softmax.int`` as a composite of other operators."""
    named = named_arguments(func, args, kwargs)
    source, dtype = named["self"], named.get("dtype")
    if source.dtype is torch.float16 and dtype is torch.float32:
        return _SOFTMAX[func.name()](source, named["dim"], True)
    return decompose(func, args, kwargs)


def register(kernels: torch.library.Library) -> None:
    """Register ``softmax`` above autograd, which would decompose it.

    Also register a kernel for RMSNorm, which autograd then calls instead of the operator's parts.
    """
    kernels.impl(_RMS_NORM, lambda *args: run(_RMS_NORM, args, {}), "Lazy")
    for func in (torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int):
        kernels.impl(func, _softmax_of(func), "AutogradLazy")


def _softmax_of(func: Operator) -> Any:
    return lambda *args, **kwargs: softmax(func, args, kwargs)


@handler("aten::_softmax", "aten::_log_softmax")
def softmax_forward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    if not named["half_to_float"] or "out" in named:
        return run_unrecorded(func, args, kwargs)
    source = named["self"]
    if source.dtype is not torch.float16:
        raise RuntimeError("conversion is supported for Half type only")
    values = func(source._inner.float(), named["dim"], False)
    return wrap(values, source._gpu, func.name().removeprefix("aten::"))


@handler("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    grad, dtype = named["grad_output"], named["input_dtype"]
    if grad.dtype is dtype or dtype is not torch.float16 or len(named) > 4:
        return run_unrecorded(func, args, kwargs)
    values, gpu = named_values(func, args, kwargs)
    gradient = func(values["grad_output"], values["output"], named["dim"], grad.dtype)
    return wrap(gradient.to(dtype), gpu, func.name().removeprefix("aten::"))


# ``F.logsigmoid``, where CUDA's backward recomputes the buffer that the CPU's forward saves.


@handler("aten::log_sigmoid_forward")
def log_sigmoid(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    if kwargs:  # out=
        return run_unrecorded(func, args, kwargs)
    (source,) = args
    output, buffer = func(source._inner)
    return wrap_result((output, buffer.new_empty(0)), source._gpu, "log_sigmoid_forward")


@handler("aten::log_sigmoid_backward")
def log_sigmoid_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = named_values(func, args, kwargs)
    _, buffer = torch.ops.aten.log_sigmoid_forward(named["self"])
    if kwargs:  # out=
        buffer = wrap(buffer, gpu, "log_sigmoid_backward")
        return run_unrecorded(func, (*args[:2], buffer), kwargs)
    return wrap(func(named["grad_output"], named["self"], buffer), gpu, "log_sigmoid_backward")


# Norms


@handler("aten::native_batch_norm")
def batch_norm(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run batch normalization with float32 statistics for half precision, as on CUDA.

    In evaluation mode, CUDA returns the running mean and 1 / sqrt(running variance + eps); the CPU
    returns empty tensors.
    """
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


# On CUDA, RMSNorm is one kernel in the forward pass and one in the backward pass, and saves one
# value per row. On other devices, torch decomposes it into six operations. Those compute the values
# here, but memory and kernel counts are CUDA's. Double backward uses torch's own formula.

_RMS_NORM = torch.ops.aten._fused_rms_norm.default


def _rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Any, Any]:
    """Return the gradients of input and weight in their own dtypes; compute in at least float32."""
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


# Without a handler, the forward operator would count as composite and run in parts.
@handler("aten::_fused_rms_norm")
def rms_norm(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    return run_unrecorded(func, args, kwargs)


# CPU versions of nn.SyncBatchNorm's five operators, which torch has only for GPUs. The
# communication is torch's own (torch.nn.modules._functions). Like the CUDA kernels
# (ATen/native/cuda/Normalization.cuh), they compute the statistics of the rank's own batch, the
# statistics over all ranks, the normalization, and the two halves of the backward pass. ``C`` is
# the number of channels, dimension 1 of the input. For float16 and bfloat16, statistics and sums
# are in float32, as on CUDA; outputs and gradients have the dtypes of their tensors.

Optional = torch.Tensor | None


def _sync_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and 1 / sqrt(variance + eps) of this rank's batch, each (C,)."""
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
    """Update the running statistics; return mean and 1 / sqrt(variance + eps) over all ranks."""
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
    """Return this rank's sums of dy and dy * (x - mean), and its gradients of weight and bias."""
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
    """Return the gradient of the input, computed from the sums over all ranks."""
    samples = count.sum()
    centered = input - _along_channels(mean, input)
    slope = _along_channels(invstd.square() * sum_dy_xmu / samples, input)
    scale = invstd if weight is None else invstd * weight
    away = grad_out - _along_channels(sum_dy / samples, input) - centered * slope
    return (away * _along_channels(scale, input)).to(input.dtype)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Cast float16 and bfloat16 to float32, the dtype in which GPUs compute."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _along_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape (C,) to (1, C, 1, ...), with as many dimensions as ``like``."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def install(changes: Changes) -> None:
    """Register kernels for CPU and meta tensors where torch has kernels for GPUs only."""
    kernels = changes.library("aten")
    for key in ("CPU", "Meta"):
        kernels.impl("_fused_rms_norm_backward", _rms_norm_backward, key)
    kernels.impl("batch_norm_stats", _sync_stats, "CPU")
    kernels.impl("batch_norm_gather_stats_with_counts", _sync_gather_stats, "CPU")
    kernels.impl("batch_norm_elemt", _sync_normalize, "CPU")
    kernels.impl("batch_norm_backward_reduce", _sync_backward_reduce, "CPU")
    kernels.impl("batch_norm_backward_elemt", _sync_backward, "CPU")


# Fused attention: CUDA's operators, computed by the CPU's fused kernel. They save the output and
# one value per row instead of the score matrix, so they use as many bytes as on a GPU, and DTensor
# and context parallelism can shard them. Strides also match a GPU's, as returned by torch's meta
# kernels. The CPU's kernel doesn't support dropout, so with dropout,
# torch_patches/attention.py computes attention unfused.


def _attention_arguments(
    func: Operator, args: Args, kwargs: Kwargs
) -> tuple[dict[str, Any], VirtualGPU]:
    """Return all arguments by name, with CPU tensors in place of virtual ones, and the GPU."""
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    values, gpu = named_values(func, args, kwargs)
    named = defaults | values
    if named["dropout_p"]:
        raise NotImplementedError(
            f"fused attention with dropout_p={named['dropout_p']} is not supported on virtual "
            "GPUs: call torch.nn.functional.scaled_dot_product_attention, which then computes it "
            "unfused"
        )
    return named, gpu


def _attention_forward(
    named: dict[str, Any], mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, (B, H, S, D), and the log-sum-exp of each row of scores, (B, H, S)."""
    parts = [named[name] for name in ("query", "key", "value")]
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *parts, 0.0, named["is_causal"], attn_mask=mask, scale=named["scale"]
    )
    return output, logsumexp


def _attention_backward(
    named: dict[str, Any], grad: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    logsumexp = named["logsumexp"][..., : named["query"].size(-2)]  # without the padding
    query, key, value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, named["query"], named["key"], named["value"], named["out"], logsumexp,
        0.0, named["is_causal"], attn_mask=mask, scale=named["scale"],
    )  # fmt: skip
    return query, key, value


def _as_rows_of_heads(values: torch.Tensor) -> torch.Tensor:
    """Lay (B, H, S, D) out in memory as (B, S, H, D), as memory-efficient attention does."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_out_as(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the values in the memory layout of ``empty_like(like)``, as flash attention does."""
    made = torch.empty_like(like)
    return values if values.stride() == made.stride() else made.copy_(values)


@handler("aten::_scaled_dot_product_flash_attention")
def flash_attention(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _attention_arguments(func, args, kwargs)
    query = named["query"]
    output, logsumexp = _attention_forward(named, None)
    # Return the RNG state, but no debug mask and no cumulative sequence lengths.
    state = torch.zeros(2, dtype=torch.uint64, device="cpu")
    results = (
        *(_laid_out_as(query, output), logsumexp.contiguous(), None, None),
        *(query.size(-2), named["key"].size(-2), state, state.new_zeros(())),
        query.new_empty(0),
    )
    return wrap_result(results, gpu, "attention")


@handler("aten::_scaled_dot_product_flash_attention_backward")
def flash_attention_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _attention_arguments(func, args, kwargs)
    gradients = _attention_backward(named, named["grad_out"], None)
    inputs = (named[name] for name in ("query", "key", "value"))
    results = tuple(_laid_out_as(*pair) for pair in zip(inputs, gradients, strict=True))
    return wrap_result(results, gpu, "attention")


@handler("aten::_scaled_dot_product_efficient_attention")
def efficient_attention(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _attention_arguments(func, args, kwargs)
    output, logsumexp = _attention_forward(named, named["attn_bias"])
    rows = logsumexp.size(-1)
    if named["compute_log_sumexp"]:
        padded = torch.nn.functional.pad(logsumexp, (0, -rows % 32), value=math.inf)
    else:
        padded = logsumexp.new_empty((*logsumexp.shape[:-1], 0))
    none = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2)]
    results = _as_rows_of_heads(output), padded.contiguous(), *none
    return wrap_result(results, gpu, "attention")


@handler("aten::_scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _attention_arguments(func, args, kwargs)
    bias = named["attn_bias"]
    if named["grad_input_mask"][3]:
        raise NotImplementedError(
            "the gradient of an attention mask is not supported in fused attention on virtual GPUs"
        )
    bias = None if bias is not None and bias.numel() == 0 else bias
    gradients = _attention_backward(named, named["grad_out_"], bias)
    results = *(_as_rows_of_heads(gradient) for gradient in gradients), None
    return wrap_result(results, gpu, "attention")
