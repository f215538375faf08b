"""Handlers for copies, the only operators that can cross devices, and for a few special operators.

Copy handlers notify the recording themselves.
"""

from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.tensor.methods import HOST, Place, has_values
from vgpu.tensor.operators import (
    Args,
    Kwargs,
    Operator,
    ShapesMode,
    handler,
    in_parts,
    info_of,
    one_by_one,
    shape_handler,
)
from vgpu.tensor.refusals import refuse_tangents
from vgpu.tensor.results import Output, counting_versions, look_up, signature_of
from vgpu.tensor.tensor import (
    ShapeTensor,
    VirtualTensor,
    block_of,
    make_shape,
    observer,
    refresh,
    unwrap,
    wrap,
    wrap_result,
)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor inside a virtual tensor; return any other tensor unchanged."""
    return tensor._inner if isinstance(tensor, VirtualTensor) else tensor


# Copies of values


@handler("aten::_to_copy", records_itself=True)
def to_copy(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run ``Tensor.to`` when it changes something."""
    (source,) = args
    refuse_tangents(args)
    options = {key: value for key, value in kwargs.items() if value is not None}
    device = options.pop("device", None)
    options.pop("pin_memory", None)
    target = source._gpu if device is None else gpus.resolve(device)
    if target is None and device.type != "cpu":
        options["device"] = device
    now = observer()
    read = source if now is None else now.before_copy(source)
    values = func(values_of(read), **options)
    result = values if target is None else wrap(values, target, "copy")
    if now is not None:
        waits = not options.get("non_blocking")
        now.after_copy(source, result, in_place=False, waits=waits)
    return result


@handler("aten::copy_", records_itself=True)
def copy_(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    target, source, *rest = args
    refuse_tangents(args)
    if _is_same_view(target, source):
        return target
    now = observer()
    read = source if now is None else now.before_copy(source)
    if not _are_same_values(target, read):
        values_of(target).copy_(values_of(read), *rest, **kwargs)
        if target.layout is not torch.strided and isinstance(target, VirtualTensor):
            refresh(target, "copy_")  # a sparse target now has different indices and values
    if now is not None:
        now.after_copy(source, target, in_place=True, waits=_waits(args, kwargs))
    return target


def _waits(args: Args, kwargs: Kwargs) -> bool:
    """Whether the host waits for ``copy_`` if it copies between the host and a GPU."""
    return not (kwargs.get("non_blocking") or args[2:3] == (True,))


def _is_same_view(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both are the same view of the same memory; torch's ``copy_`` then launches no kernel.

    So DDP's reducer copies nothing from a bucket to gradients that are views of it. The reducer's
    own check, ``is_alias_of``, compares storages, which virtual tensors don't have.
    """
    return (
        isinstance(target, VirtualTensor)
        and isinstance(source, VirtualTensor)
        and target.layout is source.layout is torch.strided
        and target._gpu is source._gpu is not HOST
        and block_of(target) is block_of(source)
        and bool(target.storage_offset() == source.storage_offset())
        and target.stride() == source.stride()
        and target.size() == source.size()
        and target.dtype is source.dtype
        and target.is_conj() == source.is_conj()
        and target.is_neg() == source.is_neg()
    )


def _are_same_values(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy would write each value back to where it was read.

    torch's C++ code (matmul with ``out=``) skips such a copy if both tensors share their storage:
    the source may be the target with its batch dimensions folded into one. C++ can't see the
    storage of virtual tensors, and the CPU's ``copy_`` raises an error if the shapes differ, or
    the strides in a dimension of size 1.
    """
    if type(target) is not VirtualTensor or type(source) is not VirtualTensor:
        return False
    to, of = target._inner, source._inner
    return (
        to.layout is of.layout is torch.strided
        and to.data_ptr() == of.data_ptr()
        and to.dtype is of.dtype
        and of.size() in (to.size(), to.flatten(0, max(0, to.dim() - of.dim())).size())
        and to.numel() > 0
        and to.is_contiguous()
        and of.is_contiguous()
        and to.is_conj() == of.is_conj()
        and to.is_neg() == of.is_neg()
    )


@handler("aten::_foreach_copy_")
def foreach_copy_(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    refuse_tangents(args)
    if any(target.layout is not torch.strided for target in args[0]):
        one_by_one(func, args, kwargs)
        return
    counting_versions(func, args, unwrap(args, [], []), kwargs, (0,))


# Copies of shapes

host_keeps_values = False
"""Whether copying a shape to a host tensor with values does nothing instead of raising an error."""


@shape_handler("aten::_to_copy")
def to_copy_of_shape(func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode) -> Any:
    (source,) = args
    target: Place | None = getattr(source, "_gpu", None)
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        is_real = not isinstance(source, VirtualTensor)
        target = gpus.resolve(device) or (HOST if device.type == "cpu" and not is_real else None)
    if target is None:
        return func(*args, **kwargs)
    info = info_of(func)
    result = look_up(info, signature_of(info, args, kwargs, []), args, kwargs)
    assert isinstance(result.outputs[0], Output)
    shape = make_shape(result.outputs[0], target, "copy")
    now = observer()
    if now is not None:
        now.before_copy(source)
        waits = not kwargs.get("non_blocking")
        now.after_copy(source, shape, in_place=False, waits=waits)
    return shape


@shape_handler("aten::copy_")
def copy_shape_(func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode) -> Any:
    target, source = args[:2]
    if not (isinstance(target, VirtualTensor) or isinstance(source, VirtualTensor)):
        return func(*args, **kwargs)
    if type(target) is not ShapeTensor:
        if host_keeps_values:
            return target
        raise has_values(target, "copy_")
    now = observer()
    if now is not None and not _is_same_view(target, source):
        now.before_copy(source)
        now.after_copy(source, target, in_place=True, waits=_waits(args, kwargs))
    return target


# Streams, pinned memory, layouts


@shape_handler("aten::record_stream")
@handler("aten::record_stream", records_itself=True)
def record_stream(
    func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode | None = None
) -> Any:
    """Do nothing unless recording: a block is never reused while an operation still needs it."""
    now = observer()
    if now is not None:
        now.record_stream(*args)


@shape_handler("aten::is_pinned")
@handler("aten::is_pinned", records_itself=True)
def is_pinned(func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode | None = None) -> Any:
    return False


@handler("aten::_pin_memory", "aten::pin_memory")
def pin_memory(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")


def pin_cpu_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Return a copy of a CPU tensor, marked as pinned; unlike real pinning, this locks no pages."""
    pinned = torch.empty_like(tensor).copy_(tensor)
    pinned.untyped_storage()._vgpu_pinned = True  # type: ignore[attr-defined]
    return pinned


def is_cpu_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    return hasattr(tensor.untyped_storage(), "_vgpu_pinned")


@shape_handler("aten::_has_compatible_shallow_copy_type")
def has_compatible_type(func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode) -> bool:
    return True


@handler("prim::layout", records_itself=True)
def layout(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    return args[0]._inner.layout


# Results on the host, random operators without a generator, and autograd's zero tensors


@handler("aten::_pack_padded_sequence")
def pack_padded_sequence(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Keep the second result, the batch size of each time step, on the host."""
    sequence, lengths, batch_first = args
    if lengths.device.type != "cpu":
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} {str(lengths.dtype).removeprefix('torch.')} tensor"
        )
    packed, batch_sizes = func(sequence._inner, lengths, batch_first)
    return wrap(packed, sequence._gpu, "_pack_padded_sequence"), batch_sizes


@handler("aten::native_dropout")
def native_dropout(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Draw the mask with the device's generator, since the operator takes none."""
    if kwargs:
        raise NotImplementedError("native_dropout with out= is not supported on virtual GPUs")
    source, p, train = args
    values = source._inner
    if values.numel() == 0 or train is False:
        return wrap_result(func(values, p, train), source._gpu, "native_dropout")
    kept = 1.0 - p
    mask = torch.empty_like(values, dtype=torch.bool)  # same strides, like the CPU's dropout
    mask.bernoulli_(kept, generator=gpus.default_generator(source._gpu))
    result = values.mul(mask).mul_(1.0 / kept if kept else 0.0)
    return wrap_result((result, mask), source._gpu, "native_dropout")


@in_parts("aten::_efficientzerotensor")
def efficient_zeros(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Replace autograd's zero tensors, which have no memory, with real zeros for CPU kernels."""
    return torch.ops.aten.zeros.default(*args, **kwargs)
