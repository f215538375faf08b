"""Look up the results of an operation on shapes by the call's signature instead of computing them.

A call's signature is everything that determines the shapes of its results and its cost. Two calls
with equal signatures return the same shapes and do the same work, whatever the values. In a
signature, a tensor is represented by the id of one meta tensor, shared by all tensors with the same
size, strides, offset and dtype.

A call with a new signature is run once on meta tensors: torch's meta kernels determine the size,
strides and dtype of a result without computing it.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from vgpu.memory import gpus
from vgpu.tensor.methods import HOST, SHAPES, Place, TensorMethods, has_values, no_value
from vgpu.tensor.operators import Args, Kwargs, OperatorInfo, tensors_in
from vgpu.tensor.refusals import refuse_mixed_norm

Signature = tuple[object, ...]


class Output(NamedTuple):
    """One tensor that an operation returns, without its device."""

    meta: torch.Tensor  # the interned meta tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int


class Result:
    """The results of all calls with one signature."""

    __slots__ = ("alone", "bases", "form", "outputs", "work")

    def __init__(
        self,
        form: Callable[[Iterable[object]], object] | None,
        outputs: list[Output | int | None],
        bases: list[int | None],
    ) -> None:
        self.form = form  # None for one tensor; otherwise list or tuple
        self.outputs = outputs  # numbers and None are stored as is
        self.bases = bases  # for each output, the index of the virtual input whose memory it shares
        # The output, if it's a single tensor with its own memory.
        only = outputs[0] if form is None and bases == [None] else None
        self.alone = only if isinstance(only, Output) else None
        self.work: Any = None  # its cost, cached here by recordings (time/recording.py)


RESULTS: dict[Signature, Result] = {}


def look_up(info: OperatorInfo, signature: Signature, args: Args, kwargs: Kwargs) -> Result:
    """Return the results of a call with this signature."""
    result = RESULTS.get(signature)
    if result is None:
        result = RESULTS[signature] = _run_on_meta(info, args, kwargs)
    return result


# Signatures

_by_metadata: dict[tuple[object, ...], torch.Tensor] = {}
# The tensors are never freed, so that no id is reused.
_by_id: dict[int, torch.Tensor] = {}

# Arguments that affect neither the shapes nor the work of a call.
_IRRELEVANT = {"device", "generator", "layout", "non_blocking", "pin_memory"}


def interned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the one meta tensor with the size, strides, offset and dtype of ``tensor``."""
    if id(tensor) in _by_id:
        return tensor
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"tensors with layout {tensor.layout} are not supported in shapes_only(): use dense "
            "tensors"
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


def signature_of(info: OperatorInfo, args: Args, kwargs: Kwargs, inputs: list[Any]) -> Signature:
    """Return everything that determines a call's result shapes and its work, as a hashable value.

    Append the virtual tensors among the arguments to ``inputs``.
    """
    signature: list[object] = [id(info)]
    # A float determines a size only in operators that create a tensor from scratch (arange).
    with_floats, in_lists = info.makes_on_device, not info.has_lists_of_factors
    for value in args:
        if type(value) in SHAPES:  # inlined for the most common case: a call is slower
            inputs.append(value)
            signature.append(id(value._inner))
        else:
            _append((value,), signature, inputs, with_floats, in_lists)
    if kwargs:
        for name, value in kwargs.items():
            if name not in _IRRELEVANT:
                signature.append(name)
                _append((value,), signature, inputs, with_floats, in_lists)
    return tuple(signature)


def _append(
    values: Iterable[Any],
    signature: list[object],
    inputs: list[Any],
    with_floats: bool,
    in_lists: bool,
) -> None:
    for value in values:
        kind = type(value)
        if kind in SHAPES:
            inputs.append(value)
            signature.append(id(value._inner))
        elif value is None:
            signature.append(None)
        elif kind is list or kind is tuple:
            if value and type(value[0]) is int:
                signature.append(tuple(value))
            else:
                signature.append(len(value))
                _append(value, signature, inputs, in_lists, in_lists)
        elif isinstance(value, torch.Tensor):
            inner = value
            if isinstance(value, TensorMethods):
                inputs.append(value)
                inner = value._inner
            number = id(inner)
            signature.append(number if number in _by_id else id(interned(inner)))
        elif kind is float and not with_floats:
            signature.append(float)
        else:
            signature.append(kind)  # 1, 1.0 and True are equal and have the same hash
            signature.append(value)


# Where a call on shapes runs, and whether it can run


def _stays_real(info: OperatorInfo, args: Args, kwargs: Kwargs) -> bool:
    """Whether a call on the host without virtual tensors computes real values.

    Integers created on the host are real, because programs branch on them, as a mesh does on its
    ranks.
    """
    if (
        not info.makes_on_device
        or next(tensors_in((args, tuple(kwargs.values()))), None) is not None
    ):
        return True
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    numbers = [number for number in args if not isinstance(number, list | tuple)]
    return info.name in _OF_INTEGERS and all(isinstance(n, int) for n in numbers)


# Without a dtype, these return integers, some only for integer arguments.
_OF_INTEGERS = {"arange", "full", "randint", "randperm", "tril_indices", "triu_indices"}


def place_of_shape(
    info: OperatorInfo,
    args: Args,
    kwargs: Kwargs,
    inputs: Sequence[TensorMethods],
    place: Place | None,
) -> Place | None:
    """Return the place of a call's result, or None if the result has values and isn't a shape."""
    device = kwargs.get("device")
    if device is not None:
        place = gpus.resolve(torch.device(device))
        if place is None and torch.device(device).type != "cpu":
            return None
    if place is None and not inputs and _stays_real(info, args, kwargs):
        return None
    return place or HOST


def require_shapes(
    info: OperatorInfo,
    args: Args,
    inputs: Sequence[TensorMethods],
    written: Sequence[torch.Tensor],
) -> None:
    """Raise an error for a call that needs values, or that would write to a tensor with values."""
    if info.waits and info.waits_for(args):
        raise no_value(inputs[0], info.name)
    for changed in written:
        if type(changed) not in SHAPES:
            raise has_values(changed, info.name)


# New signatures


def _run_on_meta(info: OperatorInfo, args: Args, kwargs: Kwargs) -> Result:
    """Run the operation on meta tensors.

    torch raises NotImplementedError if the operator has no meta kernel.
    """
    func = info.func
    are_virtual = [
        isinstance(tensor, TensorMethods) for tensor in tensors_in((args, tuple(kwargs.values())))
    ]
    args = _metas(args)
    kwargs = {name: _metas(value) for name, value in kwargs.items()}
    metas = tensors_in((args, tuple(kwargs.values())))
    virtual = [meta for meta, is_one in zip(metas, are_virtual, strict=True) if is_one]
    kwargs.pop("pin_memory", None)
    kwargs.pop("generator", None)
    kwargs.pop("non_blocking", None)
    if info.makes_on_device:
        kwargs["device"] = torch.device("meta")
    # An operator without results only changes values, and torch may have no meta kernel for it.
    had_compiler = "torch._dynamo" in sys.modules
    result: Any = func(*args, **kwargs) if func._schema.returns else None
    if not had_compiler and "torch._dynamo" in sys.modules:
        gc.collect()  # exceptions during that import hold frames of this call, and their tensors
    refuse_mixed_norm(func, args, kwargs)
    if func.name() == "aten::log_sigmoid_forward":
        result = result[0], result[0].new_empty(0)  # as on CUDA (cuda_kernels.py)
    if result is None:
        return Result(None, [], [])
    form = None if isinstance(result, torch.Tensor) else type(result)
    items = [result] if form is None else list(result)
    outputs = [output_like(item) if isinstance(item, torch.Tensor) else item for item in items]
    if func.name() in _RESIZING and isinstance(outputs[0], Output):
        least = args[0].numel() * args[0].element_size()
        outputs[0] = outputs[0]._replace(storage_bytes=max(outputs[0].storage_bytes, least))
    # Compare storages, since unsafe_split's schema doesn't declare that it returns views.
    owners = {meta.untyped_storage()._cdata: number for number, meta in enumerate(virtual)}
    bases = [
        owners.get(item.untyped_storage()._cdata) if isinstance(item, torch.Tensor) else None
        for item in items
    ]
    return Result(form, outputs, bases)


def output_like(tensor: torch.Tensor) -> Output:
    """Return an output with the metadata of ``tensor``, without its device."""
    meta = interned(tensor)
    offset = int(meta.storage_offset())
    storage_bytes = meta.untyped_storage().nbytes()
    return Output(meta, meta.size(), meta.stride(), offset, meta.dtype, storage_bytes)


# The kernels for these operators allocate a tensor like the input and resize it, which never
# shrinks the storage (ATen/native/cuda/Col2Im.cu and Im2Col.cu). The CPU kernels do the same.
_RESIZING = {"aten::col2im", "aten::im2col"}


def _metas(value: Any) -> Any:
    """Replace tensors with new meta tensors, since the interned ones must never change."""
    if isinstance(value, torch.Tensor):
        return _fresh(interned(value._inner if isinstance(value, TensorMethods) else value))
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
