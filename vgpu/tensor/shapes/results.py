"""What an operation gives back when its arguments are shapes.

Found once for each signature, by torch's own functions for meta tensors, which know the size,
strides and type of a result without computing it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from vgpu.tensor.gpu_only import norms
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.rules import rule_for
from vgpu.tensor.shapes.shape import Output
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time import signatures
from vgpu.time.costs import Workload, work_of
from vgpu.time.traits import tensors_in


class Result(NamedTuple):
    """What calls of one signature give back."""

    form: Callable[[Iterable[object]], object] | None  # None for one tensor; else list or tuple
    outputs: list[Output | int | None]  # numbers, and None, stand for themselves
    bases: list[int | None]  # the virtual input, by its number, whose memory an output shares
    work: Workload
    alone: Output | None = None  # the output, where it is one tensor with memory of its own


def learn(func: Operator, args: Args, kwargs: Kwargs) -> Result:
    """Run the operation on meta tensors and keep what came.

    NotImplementedError from torch where it has no function for meta tensors.
    """
    given = list(tensors_in((args, tuple(kwargs.values()))))
    args = _metas(args)
    kwargs = {name: _metas(value) for name, value in kwargs.items()}
    virtual = [
        meta
        for meta, tensor in zip(tensors_in((args, tuple(kwargs.values()))), given, strict=True)
        if isinstance(tensor, VirtualTensor)
    ]
    kwargs.pop("pin_memory", None)
    kwargs.pop("generator", None)
    if rule_for(func).makes_on_device:
        kwargs["device"] = torch.device("meta")
    # What hands nothing back only changes values; torch has not all of it for meta tensors.
    result = func(*args, **kwargs) if func._schema.returns else None
    if func.name() in _AS_CUDA:
        result = _AS_CUDA[func.name()](func, args, kwargs, result)
    work = work_of(func, args, kwargs, result)
    if result is None:
        return Result(None, [], [], work)
    form = None if isinstance(result, torch.Tensor) else type(result)
    items = [result] if form is None else list(result)
    outputs = [Output.of(item) if isinstance(item, torch.Tensor) else item for item in items]
    if func.name() in _RESIZING and isinstance(outputs[0], Output):
        least = args[0].numel() * args[0].element_size()
        outputs[0] = outputs[0]._replace(storage_bytes=max(outputs[0].storage_bytes, least))
    # Asked of the memory, not of the schema: unsafe_split hands out views that it does not declare.
    owners = {meta.untyped_storage()._cdata: number for number, meta in enumerate(virtual)}
    bases = [
        owners.get(item.untyped_storage()._cdata) if isinstance(item, torch.Tensor) else None
        for item in items
    ]
    alone = outputs[0] if form is None and bases == [None] else None
    return Result(form, outputs, bases, work, alone if isinstance(alone, Output) else None)


def _without_buffer(func: Operator, args: Args, kwargs: Kwargs, result: Any) -> Any:
    return result[0], result[0].new_empty(0)  # gpu_only/log_sigmoid.py


def _of_one_type(func: Operator, args: Args, kwargs: Kwargs, result: Any) -> Any:
    norms.refuse_mixed(func, args, kwargs)
    return result


# Where torch's function for meta tensors does not give what CUDA does.
_AS_CUDA: dict[str, Callable[[Operator, Args, Kwargs, Any], Any]] = {
    "aten::log_sigmoid_forward": _without_buffer,
    "aten::native_layer_norm": _of_one_type,
}


# Their kernels make a tensor like the input and resize it, by which memory never shrinks:
# ATen/native/cuda/Col2Im.cu and Im2Col.cu; the CPU's do the same.
_RESIZING = {"aten::col2im", "aten::im2col"}


def _metas(value: Any) -> Any:
    """Fresh meta tensors in place of tensors: the shared ones must never change."""
    if isinstance(value, torch.Tensor):
        inner = value._inner if isinstance(value, VirtualTensor) else value
        return _fresh(signatures.interned(inner))
    if type(value) in (list, tuple):
        return type(value)([_metas(item) for item in value])
    return value


def _fresh(shared: torch.Tensor) -> torch.Tensor:
    elements = shared.untyped_storage().nbytes() // shared.element_size()
    room = torch.empty(elements, dtype=shared.dtype, device="meta")
    fresh = room.as_strided(shared.size(), shared.stride(), shared.storage_offset())
    if shared.is_conj():
        torch._C._set_conj(fresh, True)
    return fresh
