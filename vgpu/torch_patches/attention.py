"""Attention: ``scaled_dot_product_attention``, the ``flash_attn`` package, ``flex_attention``.

``scaled_dot_product_attention`` is fused whenever CUDA would fuse it.

C++ chooses the kernel by device type, and doesn't know ours. This file chooses as on CUDA: the
first kernel, in torch's order, that's enabled (``torch.nn.attention.sdpa_kernel``) and supports the
inputs on this GPU; if there's none, it raises an error. On an A100, flash attention is chosen for
float16 and bfloat16 without a mask, memory-efficient attention for float32 or with a mask, and the
math implementation for float64. In place of cuDNN's kernel, one of the other two fused kernels
runs; it saves as many bytes for backward. Attention that the CPU's fused kernel doesn't support,
such as attention with dropout, is computed unfused.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from vgpu.memory import gpus
from vgpu.tensor import autocast as casting
from vgpu.tensor.methods import naming_devices
from vgpu.tensor.refusals import is_virtual_device
from vgpu.time import recording
from vgpu.time.host_threads import in_compiled_call
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
    changes.when_imported(_MODULE, _replace_flex_attention)


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
    """Return the bias to add to the scores; a boolean mask excludes positions where it's False."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=parts[0].dtype)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))


# The functions of the ``flash_attn`` package, for use if it isn't installed
#
# ``flash_attn`` can't be built without CUDA. Here, its functions call
# ``scaled_dot_product_attention``, which takes as much time and memory as flash attention.
# Arguments and layouts are those of flash_attn 2 (https://github.com/Dao-AILab/flash-attention):
# heads come after the sequence, and a causal mask is aligned to the bottom-right corner.
# ``softcap``, ``alibi_slopes`` and ``return_attn_probs`` aren't supported. Of the package's layers,
# rotary embeddings and normalization are included, as plain operations.


__version__ = "2.8.3"

_MODULES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn.ops",
    "flash_attn.ops.triton",
    "flash_attn.ops.triton.layer_norm",
)


def stand_in() -> None:
    """Make ``import flash_attn`` return this module, unless the package itself is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        for name in _MODULES:
            sys.modules[name] = sys.modules[__name__]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **left_out: Any,
) -> torch.Tensor:
    """Compute attention on (batch, sequence, heads, head_dim); k and v may have fewer heads than q.

    Raises RuntimeError for dtypes other than float16 and bfloat16, as flash_attn does, and
    NotImplementedError for unsupported arguments.
    """
    _refuse(left_out)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(
            f"FlashAttention only support fp16 and bf16 data type, and q is {q.dtype}"
        )
    queries, keys = q.size(1), k.size(1)
    is_square = causal and queries == keys and window_size == (-1, -1)
    mask = None if is_square else _mask(queries, keys, causal, window_size, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_square,
        scale=softmax_scale,
        enable_gqa=q.size(2) != k.size(2),
    )
    return out.transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call ``flash_attn_func`` on one tensor (batch, sequence, 3, heads, head_dim)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Call ``flash_attn_func`` on queries and one tensor (batch, sequence, 2, heads, head_dim)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Call ``flash_attn_func`` on each sequence in a packed batch: (tokens, heads, head_dim).

    ``cu_seqlens_q`` and ``cu_seqlens_k`` have the start of each sequence, and the end of the last
    one.
    """
    with recording.paused():  # on a GPU, the kernel itself reads the lengths
        lengths_q, lengths_k = (
            bounds.cpu().diff().tolist() for bounds in (cu_seqlens_q, cu_seqlens_k)
        )
    queries, keys, values = q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)
    return torch.cat(
        [
            flash_attn_func(one_q[None], one_k[None], one_v[None], *args, **kwargs)[0]
            for one_q, one_k, one_v in zip(queries, keys, values, strict=True)
        ]
    )


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    **left_out: Any,
) -> torch.Tensor:
    """Rotate each head's first 2 * n elements in (batch, sequence, heads, head_dim), in float32.

    ``cos`` and ``sin`` have shape (sequence or longer, n). Element i is paired with element i + n,
    or with i + 1 if interleaved. Raises NotImplementedError for flash_attn's other arguments.
    """
    _refuse(left_out)
    turns = 2 * cos.size(-1)
    cos, sin = (part[: x.size(1), None].float() for part in (cos, sin))
    pairs = x[..., :turns].float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], axis).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., turns:]], -1)


def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    **left_out: Any,
) -> Any:
    """Normalize the last dimension of dropout(x) + residual, in float32.

    With ``prenorm``, also return the sum. Raises NotImplementedError for flash_attn's other
    arguments, and for a bias with ``is_rms_norm``.
    """
    _refuse(left_out | ({"bias": "a tensor"} if is_rms_norm and bias is not None else {}))
    total = F.dropout(x, dropout_p).float()
    kept = torch.float32 if residual_in_fp32 else x.dtype
    if residual is not None:
        total, kept = total + residual, residual.dtype
    wide = weight.float()
    if is_rms_norm:
        out = F.rms_norm(total, weight.shape, wide, eps)
    else:
        out = F.layer_norm(total, weight.shape, wide, None if bias is None else bias.float(), eps)
    out = out.to(x.dtype)
    return (out, total.to(kept)) if prenorm else out


def _mask(
    queries: int, keys: int, causal: bool, window: tuple[int, int], device: torch.device
) -> torch.Tensor | None:
    """Return a mask, True where a query attends to a key; None if all attend to all keys."""
    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return None
    ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    ahead = ahead - (keys - queries)  # the last query is aligned with the last key
    sees = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        sees = sees & (ahead >= -left)
    if right >= 0:
        sees = sees & (ahead <= right)
    return sees


def _refuse(left_out: dict[str, Any]) -> None:
    for name, value in left_out.items():
        if name != "deterministic" and value:
            raise NotImplementedError(
                f"flash_attn with {name}={value!r} is not supported on virtual GPUs: leave it out, "
                "or compute the same result with plain operations"
            )


# ``flex_attention``, computed by PyTorch's own eager implementation
#
# PyTorch has a kernel for CUDA, and an eager implementation with plain operators that stores the
# full score matrix (``math_attention`` in torch/_higher_order_ops/flex_attention.py). Autograd goes
# through the eager one, so tensors that ``score_mod`` uses get gradients, too. As in the kernel,
# the backward pass recomputes the scores, and only the inputs and outputs are saved for it. One
# difference remains: while the eager implementation runs, all scores count as allocated, whereas
# the kernel never stores them all.


_MODULE = "torch.nn.attention.flex_attention"


def _replace_flex_attention(module: ModuleType, changes: Changes) -> None:
    changes.wrap(module, "_validate_device", _on_virtual_too)
    changes.wrap(module, "_warn_once", _but_in_compiled_calls)
    # Dynamo doesn't call this method: it handles the operator itself.
    changes.wrap(type(module.flex_attention_hop), "__call__", _by_formula)


def _on_virtual_too(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap the device-type check, whose list doesn't include virtual GPUs."""

    @functools.wraps(plain)
    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not is_virtual_device(query.device):
            plain(query, key, value)

    return _validate_device


def _but_in_compiled_calls(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap the warning about calls without ``torch.compile`` to skip it in compiled calls."""

    @functools.wraps(plain)
    def _warn_once(warning_id: str, *args: Any, **kwargs: Any) -> None:
        if warning_id != "flex_attention_performance" or not in_compiled_call():
            plain(warning_id, *args, **kwargs)

    return _warn_once


class _WithGradientLaidOutAlike(torch.autograd.Function):
    """Identity function that lays out its gradient like the tensor, as the kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.strides = x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.flex_attention import _permute_strides

        if _order(gradient.stride()) == _order(ctx.strides):
            return gradient
        return _permute_strides(gradient, ctx.strides)


def _order(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=strides.__getitem__)


def _by_formula(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the operator behind ``flex_attention``, which returns output, logsumexp and maxima."""
    from torch._higher_order_ops.flex_attention import _permute_strides, math_attention

    @functools.wraps(plain)
    def __call__(
        self: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not is_virtual_device(query.device):
            return plain(self, query, key, value, *args, **kwargs)
        query, key, value = (
            _WithGradientLaidOutAlike.apply(casting.cast_down(part)) for part in (query, key, value)
        )
        with torch.autocast(gpus.DEVICE_TYPE, enabled=False):
            output, logsumexp, maxima = checkpoint(
                math_attention, query, key, value, *args, use_reentrant=False, **kwargs
            )
        return _permute_strides(output, query.stride()), logsumexp, maxima

    return __call__
