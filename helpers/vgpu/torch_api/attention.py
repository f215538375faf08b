"""``scaled_dot_product_attention`` on a virtual GPU: fused where CUDA fuses it.

In C++ the choice is made by device type, and there ours is not known. As on CUDA, float16 and
bfloat16 without a mask take the operator of flash attention, other types and masks that of
memory-efficient attention; what neither can do, such as dropout here, is computed unfused.
``torch.nn.attention.sdpa_kernel`` is heeded.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from helpers.vgpu.changes import Changes
from helpers.vgpu.device import gpus

_HALF = (torch.float16, torch.bfloat16)


def install(changes: Changes) -> None:
    changes.wrap(F, "scaled_dot_product_attention", _fused)


def _fused(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        def unfused() -> Any:
            return plain(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )

        parts = [query, key, value]
        if not all(part.device.type == gpus.DEVICE_TYPE for part in parts):
            return unfused()
        if torch.is_autocast_enabled(gpus.DEVICE_TYPE):
            dtype = torch.get_autocast_dtype(gpus.DEVICE_TYPE)
            parts = [part.to(dtype) for part in parts]
        if enable_gqa and query.size(-3) != key.size(-3):  # equal numbers of heads are not copied
            groups = query.size(-3) // key.size(-3)
            parts[1:] = [part.repeat_interleave(groups, -3) for part in parts[1:]]
        if not _fits(parts, attn_mask, dropout_p, is_causal):
            return unfused()
        if (
            parts[0].dtype in _HALF
            and attn_mask is None
            and torch.backends.cuda.flash_sdp_enabled()
        ):
            return torch.ops.aten._scaled_dot_product_flash_attention(
                *parts, 0.0, is_causal, scale=scale
            )[0]
        if not torch.backends.cuda.mem_efficient_sdp_enabled():
            return unfused()
        keeps = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            *parts, _bias(attn_mask, parts), keeps, 0.0, is_causal, scale=scale
        )[0]

    return scaled_dot_product_attention


def _fits(
    parts: list[torch.Tensor], mask: torch.Tensor | None, dropout_p: float, is_causal: bool
) -> bool:
    """Whether the fused kernel can do it; it refuses what CUDA's refuse, and dropout."""
    query, key, value = parts
    return (
        dropout_p == 0.0
        and all(part.dim() == 4 and part.layout is torch.strided for part in parts)
        and query.dtype == key.dtype == value.dtype
        and query.is_floating_point()
        and query.size(-1) == key.size(-1) == value.size(-1)
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and key.size(-2) == value.size(-2)
        and min(query.size(-2), key.size(-2)) > 0
        and (mask is None or (not is_causal and not mask.requires_grad and mask.dim() in (2, 4)))
    )


def _bias(mask: torch.Tensor | None, parts: list[torch.Tensor]) -> torch.Tensor | None:
    """What is added to the scores: a mask of bools leaves out what is False."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=parts[0].dtype)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))
