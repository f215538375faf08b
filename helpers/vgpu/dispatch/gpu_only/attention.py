"""Fused attention: CUDA's operators, computed by the CPU's own fused kernel.

They keep the output and one number per row, not the matrix of scores, so the bytes are those of a
GPU, and DTensor and context parallelism know how to split them. Left out: dropout, which the CPU's
kernel does not have (with it, torch_api/attention.py computes attention unfused).
"""

from typing import Any

import torch

from helpers.vgpu.device.gpus import VirtualGPU
from helpers.vgpu.dispatch.operations import unwrap
from helpers.vgpu.dispatch.operators import Args, Handler, Kwargs, Operator, named_arguments
from helpers.vgpu.dispatch.same_device import check_for
from helpers.vgpu.dispatch.tensor import wrap


def _arguments(func: Operator, args: Args, kwargs: Kwargs) -> tuple[dict[str, Any], VirtualGPU]:
    """The arguments by name, with CPU tensors in place of virtual ones, and the GPU."""
    named = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    named |= named_arguments(func, args, kwargs)
    values, gpu, mixed = unwrap(named.values(), None, False)
    assert gpu is not None, "no virtual tensor among the arguments"
    if mixed:
        check_for(func)(func, args, kwargs)
    named = dict(zip(named, values, strict=True))
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
    query, key, value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, named["query"], named["key"], named["value"], named["out"], named["logsumexp"],
        0.0, named["is_causal"], attn_mask=mask, scale=named["scale"],
    )  # fmt: skip
    return query, key, value


def _nothing(gpu: VirtualGPU) -> torch.Tensor:
    """In place of what only CUDA's kernels need: states of random numbers, masks to look at."""
    return wrap(torch.zeros((), dtype=torch.int64, device="cpu"), gpu, "attention")


def flash_attention(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _arguments(func, args, kwargs)
    output, logsumexp = (wrap(part, gpu, "attention") for part in _forward(named, None))
    lengths = named["query"].size(-2), named["key"].size(-2)
    none = [_nothing(gpu) for _ in range(5)]
    return output, logsumexp, *none[:2], *lengths, *none[2:]


def flash_attention_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _arguments(func, args, kwargs)
    gradients = _backward(named, named["grad_out"], None)
    return tuple(wrap(gradient, gpu, "attention") for gradient in gradients)


def efficient_attention(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _arguments(func, args, kwargs)
    output, logsumexp = _forward(named, named["attn_bias"])
    if not named["compute_log_sumexp"]:
        logsumexp = logsumexp.new_empty((*logsumexp.shape[:-1], 0))
    none = [_nothing(gpu) for _ in range(2)]
    return wrap(output, gpu, "attention"), wrap(logsumexp, gpu, "attention"), *none


def efficient_attention_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = _arguments(func, args, kwargs)
    bias = named["attn_bias"]
    if named["grad_input_mask"][3]:
        raise NotImplementedError(
            "the gradient of an attention mask is not supported in fused attention on virtual GPUs"
        )
    bias = None if bias is not None and bias.numel() == 0 else bias
    gradients = _backward(named, named["grad_out_"], bias)
    return *(wrap(gradient, gpu, "attention") for gradient in gradients), None


HANDLERS: dict[str, Handler] = {
    "aten::_scaled_dot_product_flash_attention": flash_attention,
    "aten::_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
}
