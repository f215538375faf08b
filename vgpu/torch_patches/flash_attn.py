"""The functions of the ``flash_attn`` package on virtual GPUs, for use if it isn't installed.

``flash_attn`` can't be built without CUDA. Here, its functions call
``scaled_dot_product_attention``, which takes as much time and memory as flash attention. Arguments
and layouts are those of flash_attn 2 (https://github.com/Dao-AILab/flash-attention): heads come
after the sequence, and a causal mask is aligned to the bottom-right corner. ``softcap``,
``alibi_slopes`` and ``return_attn_probs`` aren't supported. Of the package's layers, rotary
embeddings and normalization are included, as plain operations.
"""

import importlib.util
import itertools
import sys
from typing import Any

import torch
from torch.nn import functional as F

from vgpu.time import recording

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
        bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lengths_q, lengths_k = (
        [end - begin for begin, end in itertools.pairwise(bounds)]
        for bounds in (bounds_q, bounds_k)
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
    """Return a mask, True where a query attends to a key; None if every query attends to all keys."""
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
