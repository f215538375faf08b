"""The signature of a call: what decides the shapes of its results and its cost.

Two calls with equal signatures have results of the same shapes and do the same work, whatever the
values. In a signature, a tensor is the identity of one meta tensor that all tensors of its size,
strides and type share.
"""

from collections.abc import Iterable
from typing import Any

import torch

from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.tensor import VirtualTensor

_by_metadata: dict[tuple[object, ...], torch.Tensor] = {}
# Kept for as long as the process lives, so that no id is ever given to another.
_by_id: dict[int, torch.Tensor] = {}


def interned(tensor: torch.Tensor) -> torch.Tensor:
    """The one meta tensor with the size, strides, offset and type of ``tensor``."""
    if id(tensor) in _by_id:
        return tensor
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"tensors of layout {tensor.layout} have no shape-only form: use dense tensors"
        )
    offset = tensor.storage_offset()
    dtype = tensor.dtype
    is_conj = dtype.is_complex and tensor.is_conj()
    key = (tensor.size(), tensor.stride(), offset, dtype, is_conj)
    found = _by_metadata.get(key)
    if found is None:
        size, stride = tensor.size(), tensor.stride()
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        elements = offset + (reach if tensor.numel() else 0)
        room = torch.empty(elements, dtype=dtype, device="meta")
        found = room.as_strided(size, stride, offset)
        if is_conj:
            torch._C._set_conj(found, True)
        _by_metadata[key] = found
        _by_id[id(found)] = found
    return found


def signature(func: Operator, args: Args, kwargs: Kwargs) -> tuple[object, ...]:
    """What decides the results' shapes and the work of a call; hashable."""
    parts: list[object] = [id(func)]
    # A fractional number decides a size only if a tensor is made from nothing (arange).
    first = args[0] if args else None
    from_nothing = not isinstance(first, torch.Tensor | list)
    # One in a list may (upsample), but not beside a list of tensors: foreach has a factor for each.
    in_lists = not isinstance(first, list)
    _append(parts, args, from_nothing, in_lists)
    for name, value in kwargs.items():
        if name not in NO_MATTER:
            parts.append(name)
            _append(parts, (value,), from_nothing, in_lists)
    return tuple(parts)


# Arguments that decide neither the shapes nor the work of a call.
NO_MATTER = {"device", "generator", "layout", "non_blocking", "pin_memory"}


def _append(parts: list[object], values: Iterable[Any], with_floats: bool, in_lists: bool) -> None:
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            inner = value._inner if isinstance(value, VirtualTensor) else value
            parts.append(id(interned(inner)))
        elif kind is list or kind is tuple:
            parts.append(len(value))
            _append(parts, value, in_lists, in_lists)
        elif kind is float and not with_floats:
            parts.append(float)
        else:
            # 1, 1.0 and True are equal and hash alike.
            parts.append(kind)
            parts.append(value)
