"""``scaled_dot_product_attention`` on a virtual GPU: fused whenever CUDA would fuse it.

C++ chooses the kernel by device type, and doesn't know ours. This file chooses as on CUDA: the
first kernel, in torch's order, that's enabled (``torch.nn.attention.sdpa_kernel``) and supports the
inputs on this GPU; if there's none, it raises an error. On an A100, that's flash attention for
float16 and bfloat16 without a mask, memory-efficient attention for float32 or with a mask, and the
math implementation for float64. In place of cuDNN's kernel, one of the other two fused kernels
runs; they save the same number of bytes. Attention that the CPU's fused kernel doesn't support,
such as with dropout, is computed unfused.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from vgpu.memory import gpus
from vgpu.tensor import autocast as casting
from vgpu.tensor.methods import naming_devices
from vgpu.torch_patches.undo import Changes

_HALF = (torch.float16, torch.bfloat16)
_IS_ENABLED = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def install(changes: Changes) -> None:
    # CausalBias overrides the function under this name; torch._C._nn has the C++ function.
    changes.wrap_function("scaled_dot_product_attention", _fused, F, torch._C._nn)


def _fused(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    named = naming_devices(plain)

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
            return named(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )

        if not all(part.device.type == gpus.DEVICE_TYPE for part in (query, key, value)):
            return unfused()
        query, key, value, attn_mask = (
            casting.cast_down(part) for part in (query, key, value, attn_mask)
        )
        if not query.dtype == key.dtype == value.dtype or (attn_mask is not None and is_causal):
            return unfused()  # which raises torch's error
        parts = [query, key, value]
        if enable_gqa and query.size(-3) != key.size(-3):  # equal numbers of heads need no copies
            groups = query.size(-3) // key.size(-3)
            parts[1:] = [part.repeat_interleave(groups, -3) for part in parts[1:]]
        chosen = _choose(parts, attn_mask, is_causal)
        if chosen == SDPBackend.MATH or not _has_cpu_kernel(parts, attn_mask, dropout_p):
            return unfused()
        if chosen != SDPBackend.EFFICIENT_ATTENTION and attn_mask is None:
            return torch.ops.aten._scaled_dot_product_flash_attention(
                *parts, 0.0, is_causal, scale=scale
            )[0]
        keeps = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            *parts, _bias(attn_mask, parts), keeps, 0.0, is_causal, scale=scale
        )[0]

    return scaled_dot_product_attention


def _choose(parts: list[torch.Tensor], mask: torch.Tensor | None, is_causal: bool) -> SDPBackend:
    """Choose a kernel as select_sdp_backend does (ATen/native/transformers/cuda/sdp_utils.cpp).

    Raises RuntimeError, as on CUDA, if no enabled kernel supports the inputs.
    """
    gpu = gpus.resolve(parts[0].device)
    assert gpu is not None, "attention inputs aren't on a virtual GPU"
    capability = gpu.spec.compute_capability
    possible = {SDPBackend.MATH}
    if _are_regular(parts):
        if _suit_flash(parts, mask, is_causal, capability):
            possible.add(SDPBackend.FLASH_ATTENTION)
        if _suit_efficient(parts, capability):
            possible.add(SDPBackend.EFFICIENT_ATTENTION)
        if _suit_cudnn(parts, capability):
            possible.add(SDPBackend.CUDNN_ATTENTION)
    order = (SDPBackend(number) for number in torch._C._get_sdp_priority_order())
    enabled = [one for one in order if one in _IS_ENABLED and _IS_ENABLED[one]()]
    for backend in enabled:
        if backend in possible:
            return backend
    query, key, _ = parts
    names = ", ".join(one.name for one in enabled)
    raise RuntimeError(
        "No available kernel. Aborting execution. "
        f"None of the enabled kernels ({names or 'none'}) supports these inputs on a "
        f"{gpu.spec.name}: {query.dtype}, queries {list(query.size())}, keys {list(key.size())}, "
        f"{'no mask' if mask is None else 'a mask'}. Allow another one with sdpa_kernel."
    )


def _are_regular(parts: list[torch.Tensor]) -> bool:
    """Whether the inputs meet the requirements of every fused kernel."""
    query, key, value = parts
    return (
        all(part.dim() == 4 and part.layout is torch.strided for part in parts)
        and query.size(-1) == key.size(-1)
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and key.size(-2) == value.size(-2)
        and min(query.size(-2), key.size(-2)) > 0
        and all(part.size(-1) == 1 or part.stride(-1) == 1 for part in parts)
    )


def _suit_flash(
    parts: list[torch.Tensor],
    mask: torch.Tensor | None,
    is_causal: bool,
    capability: tuple[int, int],
) -> bool:
    query, key, value = parts
    return (
        capability >= (8, 0)
        and query.dtype in _HALF
        and mask is None
        and query.size(-1) == value.size(-1) <= 256
        and not (is_causal and query.size(-2) != key.size(-2))
    )


def _suit_efficient(parts: list[torch.Tensor], capability: tuple[int, int]) -> bool:
    query, _, value = parts
    if query.dtype is torch.float32:
        multiple = 4 if capability >= (8, 0) else 1
    elif query.dtype is torch.float16 or (query.dtype is torch.bfloat16 and capability >= (8, 0)):
        multiple = 8 if capability >= (7, 0) else 1
    else:
        return False
    widths = query.size(-1), value.size(-1)
    return capability >= (5, 0) and all(width > 0 and width % multiple == 0 for width in widths)


def _suit_cudnn(parts: list[torch.Tensor], capability: tuple[int, int]) -> bool:
    query, key, value = parts
    widths = query.size(-1), value.size(-1)
    return (
        capability >= (8, 0)
        and query.dtype in _HALF
        and all(width <= 128 and width % 8 == 0 for width in widths)
        and key.size(-2) != 1
    )


def _has_cpu_kernel(parts: list[torch.Tensor], mask: torch.Tensor | None, dropout_p: float) -> bool:
    """Whether the CPU's fused kernel supports the inputs."""
    query, _, value = parts
    return (
        dropout_p == 0.0
        and query.size(-1) == value.size(-1)
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
    )


def _bias(mask: torch.Tensor | None, parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the bias that's added to the scores; a boolean mask excludes positions where it's False."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=parts[0].dtype)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))
