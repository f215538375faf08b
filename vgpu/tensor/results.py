"""An operation's results: computed on the CPU or, for shapes, looked up by the call's signature."""

import gc
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.methods import HOST, SHAPES, Place, TensorMethods, has_values, no_value
from vgpu.tensor.operators import Args, Kwargs, Operator, OperatorInfo, tensors_in
from vgpu.tensor.refusals import refuse_mixed_norm

# Values: the CPU computes the results from the tensors inside virtual ones

# C++ resolves lazy conjugation and negation before it calls Python. Kernels that consist of
# multiple operators rely on that for their parts, too, so it's turned back on for CPU kernels.
_resolving = torch._C._SetExcludeDispatchKeyGuard
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def compute(
    info: OperatorInfo,
    args: Args,
    inner_args: list[Any],
    inner_kwargs: Kwargs,
    gpu: VirtualGPU | None,
) -> Any:
    """Return the operator's results, computed on the CPU.

    ``inner_args`` and ``inner_kwargs`` have CPU tensors in place of virtual ones.
    """
    func = info.func
    if info.unchanged:
        return func(*inner_args, **inner_kwargs)
    if info.draws and gpu is not None:
        return _draw(info, inner_args, inner_kwargs, gpu)
    if info.writes_lists:
        return counting_versions(func, args, inner_args, inner_kwargs, info.writes_lists)
    if info.convolves and inner_args[0].dtype is torch.float16:
        return _in_float32(func, inner_args)
    if any(_is_complex(value) for value in inner_args):
        with _resolving(_CONJUGATE, False), _resolving(_NEGATIVE, False):
            return func(*inner_args, **inner_kwargs)
    return func(*inner_args, **inner_kwargs)


def _draw(
    info: OperatorInfo, inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU
) -> Any:
    """Run an operator that draws random numbers, with the call's generator or the GPU's default."""
    if info.with_generator is None:  # operators that draw without one have handlers
        return info.func(*inner_args, **inner_kwargs)
    generator = gpus.generator_for(gpu, inner_kwargs.get("generator"))
    return info.with_generator(*inner_args, **{**inner_kwargs, "generator": generator})


def counting_versions(
    func: Operator,
    args: Args,
    inner_args: list[Any],
    inner_kwargs: Kwargs,
    positions: Iterable[int],
) -> Any:
    """Run an operator that modifies the lists of tensors at ``positions`` in place.

    C++ increments the version of a single tensor that is modified in place, but not the versions of
    tensors in a list. Here, each tensor in a list gets as many increments as an alias of its
    values.
    """
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in positions:
        inner_args[position] = [
            values if values.is_inference() else values.data for values in inner_args[position]
        ]
        changed += zip(args[position], inner_args[position], strict=True)
    try:
        with _resolving(_IN_PLACE_OR_VIEW, False):
            return func(*inner_args, **inner_kwargs)
    finally:
        for one, alias in changed:
            if not alias.is_inference():
                torch._C._increment_version([one] * alias._version)


def _in_float32(func: Operator, inner_args: Sequence[Any]) -> Any:
    """Run a float16 convolution in float32, the dtype in which GPUs accumulate.

    The CPU's float16 kernel is 50 times slower.
    """

    def cast(values: Iterable[Any], dtype: torch.dtype, wider: torch.dtype) -> list[Any]:
        return [
            value.to(wider) if isinstance(value, torch.Tensor) and value.dtype is dtype else value
            for value in values
        ]

    result = func(*cast(inner_args, torch.float16, torch.float32))
    if isinstance(result, torch.Tensor):
        return result.to(torch.float16)
    return tuple(cast(result, torch.float32, torch.float16))


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def set_inner_device(inner_kwargs: Kwargs, gpu: VirtualGPU | None) -> VirtualGPU | None:
    """Replace ``device=`` with the CPU; return the result's GPU, or None for a real device."""
    device = inner_kwargs.get("device")
    if device is None:
        return gpu
    target = gpus.resolve(device)
    if target is not None:
        inner_kwargs["device"] = "cpu"
        inner_kwargs.pop("pin_memory", None)
    return target


# The host's memory, which may be smaller than the GPU's


def require_room(inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU) -> None:
    """Raise torch.OutOfMemoryError before the CPU allocates more memory than the GPU has left."""
    # A factory's first argument is the size, or a tensor (``*_like``), perhaps followed by the
    # size.
    first = size = inner_args[0] if inner_args else None
    if isinstance(first, torch.Tensor) and len(inner_args) > 1:
        size = inner_args[1]
    if not isinstance(size, list) or not all(isinstance(number, int) for number in size):
        return
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.get_default_dtype()
    dtype = inner_kwargs.get("dtype") or dtype
    gpu.memory.require(math.prod(size) * dtype.itemsize)


def refuse_host_memory(error: RuntimeError, gpu: VirtualGPU) -> None:
    """Raise the GPU's torch.OutOfMemoryError if the CPU's allocator failed to allocate a result."""
    found = _HOST_REFUSAL.search(str(error))
    if found is not None:
        size_bytes = int(found[1])
        gpu.memory.require(size_bytes)
        raise torch.OutOfMemoryError(gpu.memory.out_of_host_memory(size_bytes)) from None


_HOST_REFUSAL = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")


# Shapes: results are looked up by the call's signature instead of computed
#
# A call's signature is everything that determines the shapes of its results and its cost. Two calls
# with equal signatures return the same shapes and do the same work, whatever the values. In a
# signature, a tensor is represented by the id of one meta tensor, shared by all tensors with the
# same size, strides, offset and dtype.
#
# A call with a new signature is run once on meta tensors: torch's meta kernels determine the size,
# strides and dtype of a result without computing it.

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
