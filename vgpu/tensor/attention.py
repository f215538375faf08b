"""Fused attention: CUDA's operators, computed by the CPU's own fused kernel.

They keep the output and one number per row, not the matrix of scores, so the bytes are those of a
GPU, and DTensor and context parallelism know how to split them. Strides are a GPU's too, as torch's
functions for meta tensors have them. Left out: dropout, which the CPU's kernel does not have (with
it, torch_patches/attention.py computes attention unfused).
"""

import math
from typing import Any

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operator_info import handler
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.tensor import named_values, wrap_result


def _arguments(func: Operator, args: Args, kwargs: Kwargs) -> tuple[dict[str, Any], VirtualGPU]:
    """All arguments by name, with CPU tensors in place of virtual ones, and the GPU."""
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    values, gpu = named_values(func, args, kwargs)
    named = defaults | values
    if named["dropout_p"]:
        raise NotImplementedError(
            f"fused attention with dropout_p={named['dropout_p']} is not supported on virtual GPUs: "
            "call torch.nn.functional.scaled_dot_product_attention, which then computes it unfused"
        )
    return named, gpu


def _forward(named: dict[str, Any], mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithm of each row's sum: (B, H, S, D) and (B, H, S)."""
    parts = [named[name] for name in ("query", "key", "value")]
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *parts, 0.0, named["is_causal"], attn_mask=mask, scale=named["scale"]
    )
    return output, logsumexp


def _backward(
    named: dict[str, Any], grad: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    logsumexp = named["logsumexp"][..., : named["query"].size(-2)]  # without the padding
    query, key, value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, named["query"], named["key"], named["value"], named["out"], logsumexp,
        0.0, named["is_causal"], attn_mask=mask, scale=named["scale"],
    )  # fmt: skip
    return query, key, value


def _as_rows_of_heads(values: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) laid out as (B, S, H, D): how the memory-efficient kernels write."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_out_as(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values, in the memory that ``empty_like(like)`` has: how flash attention writes."""
    made = torch.empty_like(like)
    return values if values.stride() == made.stride() else made.copy_(values)


@handler("aten::_scaled_dot_product_flash_attention")
def flash_attention(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _arguments(func, args, kwargs)
    query = named["query"]
    output, logsumexp = _forward(named, None)
    # State of random numbers; there is no mask to look at, and no lengths of packed sequences.
    state = torch.zeros(2, dtype=torch.uint64, device="cpu")
    results = (
        *(_laid_out_as(query, output), logsumexp.contiguous(), None, None),
        *(query.size(-2), named["key"].size(-2), state, state.new_zeros(())),
        query.new_empty(0),
    )
    return wrap_result(results, gpu, "attention")


@handler("aten::_scaled_dot_product_flash_attention_backward")
def flash_attention_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _arguments(func, args, kwargs)
    gradients = _backward(named, named["grad_out"], None)
    inputs = (named[name] for name in ("query", "key", "value"))
    results = tuple(_laid_out_as(*pair) for pair in zip(inputs, gradients, strict=True))
    return wrap_result(results, gpu, "attention")


@handler("aten::_scaled_dot_product_efficient_attention")
def efficient_attention(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _arguments(func, args, kwargs)
    output, logsumexp = _forward(named, named["attn_bias"])
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
    named, gpu = _arguments(func, args, kwargs)
    bias = named["attn_bias"]
    if named["grad_input_mask"][3]:
        raise NotImplementedError(
            "the gradient of an attention mask is not supported in fused attention on virtual GPUs"
        )
    bias = None if bias is not None and bias.numel() == 0 else bias
    gradients = _backward(named, named["grad_out_"], bias)
    results = *(_as_rows_of_heads(gradient) for gradient in gradients), None
    return wrap_result(results, gpu, "attention")
