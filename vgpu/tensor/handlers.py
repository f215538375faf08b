"""Operators that cross devices or reach below a tensor, each with a handler of its own."""

from collections.abc import Callable
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.tensor.generators import default_generator
from vgpu.tensor.operations import compute, counting_versions, refresh, unwrap, wrap_result
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator
from vgpu.tensor.refusals import refuse_tangents
from vgpu.tensor.rules import one_by_one
from vgpu.tensor.same_device import check_for
from vgpu.tensor.tensor import VirtualTensor, wrap

HANDLERS: dict[str, Handler] = {}


def special(*names: str) -> Callable[[Handler], Handler]:
    """Decorator: the function handles the operators ``names``."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update((name, handler) for name in names)
        return handler

    return register


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor inside a virtual one; any other tensor itself."""
    return tensor._inner if isinstance(tensor, VirtualTensor) else tensor


@special("aten::_to_copy")
def to_copy(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """``Tensor.to`` where something changes: the only way from one device to another."""
    (source,) = args
    refuse_tangents(args)
    options = {key: value for key, value in kwargs.items() if value is not None}
    device = options.pop("device", None)
    options.pop("pin_memory", None)
    target = source._gpu if device is None else gpus.resolve(device)
    if target is None and device.type != "cpu":
        return func(source._inner, device=device, **options)
    values = func(values_of(source), **options)
    return values if target is None else wrap(values, target, "copy")


@special("aten::copy_")
def copy_(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    target, source, *rest = args
    refuse_tangents(args)
    if not _are_same_values(target, source):
        values_of(target).copy_(values_of(source), *rest, **kwargs)
        if target.layout is not torch.strided and isinstance(target, VirtualTensor):
            refresh(target, "copy_")  # it has other indices and values now
    return target


def _are_same_values(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy would only write each value to where it is read.

    torch's C++ (matmul with ``out=``) skips such a copy if the two tensors share their storage. It
    cannot see the storage of virtual ones, and the CPU refuses to copy a tensor onto itself.
    """
    if type(target) is not VirtualTensor or type(source) is not VirtualTensor:
        return False
    to, of = target._inner, source._inner
    return (
        to.layout is of.layout is torch.strided
        and to.data_ptr() == of.data_ptr()
        and to.dtype is of.dtype
        and to.size() == of.size()
        and to.numel() > 0
        and to.is_contiguous()
        and of.is_contiguous()
        and to.is_conj() == of.is_conj()
        and to.is_neg() == of.is_neg()
    )


@special("aten::_foreach_copy_")
def foreach_copy_(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    refuse_tangents(args)
    if any(target.layout is not torch.strided for target in args[0]):
        one_by_one(func, args, kwargs)
        return
    inner_args, _, _ = unwrap(args, None, False)
    counting_versions(func, args, inner_args, kwargs, (0,))


@special("aten::record_stream")
def record_stream(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Nothing to do: a block is never reused while an operation still needs it."""


@special("aten::is_pinned")
def is_pinned(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    return False


@special("aten::_pin_memory", "aten::pin_memory")
def pin_memory(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")


@special("aten::_pack_padded_sequence")
def pack_padded_sequence(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """The second result, the batch size of each time step, stays on the host."""
    sequence, lengths, batch_first = args
    if lengths.device.type != "cpu":
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} {str(lengths.dtype).removeprefix('torch.')} tensor"
        )
    packed, batch_sizes = func(sequence._inner, lengths, batch_first)
    return wrap(packed, sequence._gpu, "_pack_padded_sequence"), batch_sizes


@special("aten::native_dropout")
def native_dropout(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """The operator takes no generator: its mask is drawn from the device's here."""
    if kwargs:
        raise NotImplementedError("native_dropout with out= is not supported on virtual GPUs")
    source, p, train = args
    values = source._inner
    if values.numel() == 0 or train is False:
        return wrap_result(func(values, p, train), source._gpu, "native_dropout")
    kept = 1.0 - p
    mask = torch.empty_like(values, dtype=torch.bool)  # strides and all, as the CPU's dropout
    mask.bernoulli_(kept, generator=default_generator(source._gpu))
    result = values.mul(mask).mul_(1.0 / kept if kept else 0.0)
    return wrap_result((result, mask), source._gpu, "native_dropout")


@special("aten::_sparse_mm_reduce_impl")
def sparse_mm_reduce(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Its kernel keeps what the backward pass reads only if an operand requires a gradient."""
    (matrix, other), gpu, mixed = unwrap(args[:2], None, False)
    if mixed:
        check_for(func)(func, args, kwargs)
    with torch.enable_grad():
        results = func(matrix.detach().requires_grad_(), other, *args[2:])
    return wrap_result([result.detach() for result in results], gpu, "_sparse_mm_reduce_impl")


@special("aten::_efficientzerotensor")
def efficient_zeros(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Autograd's zeros without memory: the CPU's kernels, called from here, would read there."""
    return compute(torch.ops.aten.zeros.default, args, kwargs)


@special("prim::layout")
def layout(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    return args[0]._inner.layout


def pin_cpu_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """``Tensor.pin_memory`` of a CPU tensor: a copy that says it is pinned; no page is locked."""
    pinned = torch.empty_like(tensor).copy_(tensor)
    pinned.untyped_storage()._vgpu_pinned = True  # type: ignore[attr-defined]
    return pinned


def is_cpu_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    return hasattr(tensor.untyped_storage(), "_vgpu_pinned")
