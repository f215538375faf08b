"""The tensors of a virtual GPU, and how every operation on them runs. Start reading at ``run``.

A :class:`VirtualTensor` wraps a CPU tensor that holds the values; a :class:`ShapeTensor` wraps a
meta tensor, without values. To C++, both are tensors without storage on ``lazy:k``. That device
type was chosen because autograd keeps its index (the backward of a copy between two virtual GPUs
copies back) and runs its backward pass in the CPU's queue, and because torch ships no kernels for
it, so tensors created by autograd's formulas are dispatched to ``run`` as well.
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vgpu.memory.blocks import Block
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor import refusals
from vgpu.tensor.methods import (
    HOST,
    Place,
    ShapeMethods,
    TensorMethods,
    count_bytes,
    strided_parts,
    virtual_among,
)
from vgpu.tensor.operators import (
    KNOWN,
    Args,
    Handler,
    Kwargs,
    Operator,
    OperatorInfo,
    ShapesMode,
    argument,
    info_of,
    named_arguments,
)
from vgpu.tensor.refusals import refuse_tangents
from vgpu.tensor.results import (
    RESULTS,
    Output,
    Result,
    compute,
    look_up,
    output_like,
    place_of_shape,
    refuse_host_memory,
    require_room,
    require_shapes,
    set_inner_device,
    signature_of,
)

_make_wrapper = torch.Tensor._make_wrapper_subclass
_in_inference_mode = torch.is_inference_mode_enabled
set_cpp_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class VirtualTensor(TensorMethods):
    """A tensor on a virtual GPU; created by torch's own functions, never directly."""

    # There are no slots, because a plain tensor that becomes virtual (in_place.py)
    # has none. torch's functions run unchanged; only TensorMethods knows the virtual device's name.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if len(types) > 1 and not all(issubclass(kind, VirtualTensor) for kind in types):
            return NotImplemented  # a tensor that wraps a virtual one (DTensor) goes first
        return run(func, args, kwargs or {})

    def _copy_memory(self, memo: dict[int, Any]) -> torch.Tensor:
        return wrap(copy.deepcopy(self._inner, memo), self._gpu, "deepcopy")


# torch breaks the lines of a printed tensor according to the length of this name.
VirtualTensor.__name__ = "Tensor"


class ShapeTensor(ShapeMethods, VirtualTensor):
    """A tensor on a virtual GPU or the host: size, strides, dtype and bytes, but no values."""

    _gpu: Place  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if len(types) > 1 and around_shapes(types):
            return NotImplemented
        return run(func, args, kwargs or {}, _NO_MODE)

    def _copy_memory(self, memo: dict[int, Any]) -> torch.Tensor:
        block = self._block
        base: ShapeTensor | None = None if block is None else memo.get(id(block))
        result = make_shape(output_like(self._inner), self._gpu, "deepcopy", base)
        if block is not None:
            memo.setdefault(id(block), result)
        return result


def around_shapes(types: tuple[type, ...]) -> bool:
    """Whether one of the types wraps shapes, as DTensor does; it dispatches again with them."""
    for kind in types:
        if (
            kind is not ShapeTensor  # checked first, since nearly all types are this one
            and not issubclass(kind, VirtualTensor)
            and getattr(kind, "__torch_dispatch__", None) is not _NO_DISPATCH
        ):
            return True
    return False


_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_NO_MODE = nullcontext()


# How a recording of virtual time is notified


@dataclass(slots=True)
class Operation:
    """One call of an operator, as passed to a recording."""

    info: OperatorInfo
    args: Args
    kwargs: Kwargs
    inputs: Sequence[Any]  # the virtual tensors among the arguments
    written: Sequence[Any]  # the tensors that the call modifies in place
    gpu: VirtualGPU
    stream: Any = None  # set by the recording, as is the host thread
    host: Any = None


class Observer(Protocol):
    """Called by ``run`` and the handlers; implemented by ``Recording`` (time/recording.py)."""

    def before(self, operation: Operation) -> None:
        """Called before ``operation``. Puts garbage in place of what it reads too early."""

    def after(self, operation: Operation, outputs: Any, result: Result | None) -> None:
        """Called after ``operation``. For shapes, ``result`` is the looked-up result."""

    def before_copy(self, source: torch.Tensor) -> torch.Tensor:
        """Called before a copy. Returns what to read: ``source``, or garbage if it's too early."""

    def after_copy(
        self, source: torch.Tensor, target: torch.Tensor, in_place: bool, waits: bool
    ) -> None:
        """Called after a copy. ``waits`` says whether the host waits for it."""

    def record_stream(self, used: Any, stream: torch.Stream) -> None:
        """Called for ``used.record_stream(stream)``."""


_observer: Observer | None = None


def observer() -> Observer | None:
    """Return the active recording, if any."""
    return _observer


def set_observer(recording: Observer | None) -> None:
    """Make ``run`` and the handlers call a recording (``time.recording._switched_to``), or none."""
    global _observer
    _observer = recording


# How an operation runs


def run(
    func: Operator,
    args: Args,
    kwargs: Kwargs,
    mode: ShapesMode | None = None,
    for_handler: bool = False,
) -> Any:
    """Run one operation on virtual tensors; every operation comes through here.

    ``mode`` is None for tensors with values. For shapes, it's the dispatch mode of the
    ``shapes_only()`` block that the call came through, or a null context. For ``for_handler``, see
    ``run_unrecorded``.
    """
    info = KNOWN.get(id(func)) or info_of(func)
    now: Observer | None = None
    if not for_handler:
        if info.decomposes is not None and info.decomposes(args, kwargs):
            with mode or _NO_MODE:
                return info.parts(func, args, kwargs)
        if mode is None:
            if info.handler is not None:
                return _run_handler(info, info.handler, args, kwargs)
        elif info.shape_handler is not None and (
            info.copies or virtual_among((*args, *kwargs.values()))
        ):
            return info.shape_handler(func, args, kwargs, mode)
        now = _observer

    # Read the arguments: the CPU tensors inside, or what determines the shapes of the results.
    inputs: list[VirtualTensor] = []
    mixed = False
    if mode is not None:
        signature = signature_of(info, args, kwargs, inputs)
    else:
        others: list[torch.Tensor] = []
        inner_args = unwrap(args, inputs, others)
        inner_kwargs = kwargs
        if kwargs:
            inner_kwargs = dict(zip(kwargs, unwrap(kwargs.values(), inputs, others), strict=True))
        if others:
            mixed = True

    # Where does it run?
    gpu: Any = None
    for tensor in inputs:
        if tensor._gpu is not gpu:
            mixed = mixed or gpu is not None
            gpu = tensor._gpu if gpu is None or gpu is HOST else gpu
    if mixed:
        refuse_tangents((args, *kwargs.values()))
        refusals.check_same_device(info, args, kwargs)
    if mode is not None and (gpu is None or info.makes_on_device):
        gpu = place_of_shape(info, args, kwargs, inputs, gpu)
        if gpu is None:  # the call computes real values
            return func(*args, **kwargs)
    elif info.makes_on_device:
        gpu = set_inner_device(inner_kwargs, gpu)
        if gpu is not None:
            require_room(inner_args, inner_kwargs, gpu)

    # Notify the recording, if one is active.
    written: Sequence[torch.Tensor] = ()
    if (info.writes or info.waits) and (mode is not None or now is not None):
        written = info.written(args, kwargs)
        if mode is not None:
            require_shapes(info, args, inputs, written)
    operation = None
    if now is not None and isinstance(gpu, VirtualGPU):
        operation = Operation(info, args, kwargs, inputs, written, gpu)
        now.before(operation)
        if operation.args is not args:  # a race: something is read before it has been written
            args, kwargs = operation.args, operation.kwargs
            inner_args = unwrap(args, [], [])
            inner_kwargs = dict(zip(kwargs, unwrap(kwargs.values(), [], []), strict=True))

    # Compute the values, or look up the shapes; wrap the results, which counts their bytes.
    looked_up: Result | None = None
    if mode is not None:
        looked_up = RESULTS.get(signature) or look_up(info, signature, args, kwargs)
        if looked_up.alone is not None and info.aliases is None:
            outputs: Any = make_shape(looked_up.alone, gpu, info.name)
        else:
            outputs = _wrap_shapes(info, args, kwargs, inputs, looked_up, gpu)
    else:
        try:
            result = compute(info, args, inner_args, inner_kwargs, gpu)
        except RuntimeError as error:
            _clean_up(info, args, kwargs, gpu, error)
            raise
        if info.unreturned:
            _refresh_unreturned(info, args, kwargs)
        if info.aliases is not None:
            outputs = _wrap_arguments(info, info.aliases, result, args, kwargs, gpu)
        elif gpu is not None and type(result) is torch.Tensor:
            outputs = wrap(result, gpu, info.name)
        else:
            outputs = wrap_result(result, gpu, info.name)
    if operation is not None and now is not None:
        now.after(operation, outputs, looked_up)
    return outputs


def run_unrecorded(
    func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode | None = None
) -> Any:
    """Run one operation, bypassing its handler and the recording; for use in handlers."""
    return run(func, args, kwargs, mode, for_handler=True)


def _run_handler(info: OperatorInfo, handler: Handler, args: Args, kwargs: Kwargs) -> Any:
    now = _observer
    if now is None or info.records_itself:
        return handler(info.func, args, kwargs)
    inputs = virtual_among((*args, *kwargs.values()))
    written = info.written(args, kwargs)
    operation = Operation(info, args, kwargs, inputs, written, inputs[0]._gpu)
    now.before(operation)
    outputs = handler(info.func, operation.args, operation.kwargs)
    now.after(operation, outputs, None)
    return outputs


# Reading the arguments


def unwrap(
    values: Iterable[Any], inputs: list[VirtualTensor], others: list[torch.Tensor]
) -> list[Any]:
    """Return the values with CPU tensors in place of virtual ones.

    Append the virtual tensors to ``inputs``, and all other tensors to ``others``.
    """
    inner = []
    for value in values:
        kind = type(value)
        if kind is VirtualTensor:
            inputs.append(value)
            value = value._inner
        elif kind is list or kind is tuple:
            value = unwrap(value, inputs, others)
        elif isinstance(value, torch.Tensor):
            others.append(value)
        inner.append(value)
    return inner


def named_values(func: Operator, args: Args, kwargs: Kwargs) -> tuple[Kwargs, VirtualGPU]:
    """Return the arguments by name, with CPU tensors in place of virtual ones, and the GPU.

    This is for handlers. Raises RuntimeError if the devices differ.
    """
    named = named_arguments(func, args, kwargs)
    inputs: list[VirtualTensor] = []
    others: list[torch.Tensor] = []
    values = unwrap(named.values(), inputs, others)
    gpu = inputs[0]._gpu
    if others or any(tensor._gpu is not gpu for tensor in inputs):
        refusals.check_same_device(info_of(func), args, kwargs)
    return dict(zip(named, values, strict=True)), gpu


# Wrapping results, and counting their bytes

# The key for autocast on our device; sparse tensors need keys from which C++ determines the layout.
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_AUTOCAST_ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_COO = torch._C.DispatchKeySet(torch._C.DispatchKey.Sparse)
_COMPRESSED = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsr)


def wrap(values: torch.Tensor, gpu: VirtualGPU, operation: str) -> VirtualTensor:
    """Put ``values`` on ``gpu``, and count their storage there if it hasn't been counted yet.

    Raises torch.OutOfMemoryError if the storage doesn't fit.
    """
    inference = values.is_inference()
    if inference is not _in_inference_mode():
        # A view of a normal tensor is a normal tensor, even in inference mode.
        with torch.inference_mode(inference):
            return wrap(values, gpu, operation)
    layout = values.layout
    if layout is torch.strided:
        storage = values.untyped_storage()  # count_bytes inlined, for speed
        if not hasattr(storage, "_vgpu_block"):
            storage._vgpu_block = gpu.memory.allocate(storage.nbytes(), operation)  # type: ignore[attr-defined]
        tensor = _make_wrapper(
            VirtualTensor,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset() or None,  # passing 0 is slower
            dtype=values.dtype,
            device=gpu.cpp_device,
            _extra_dispatch_keys=_AUTOCAST,
        )
        # C++ resolves lazy conjugation and negation before it calls us, if the keys say so.
        if values.is_conj():
            torch._C._set_conj(tensor, True)
        if values.is_neg():
            torch._C._set_neg(tensor, True)
    else:
        for part in strided_parts(values):
            count_bytes(part, gpu, operation)
        tensor = _make_wrapper(
            VirtualTensor,
            values.size(),
            dtype=values.dtype,
            device=gpu.cpp_device,
            dispatch_layout=layout is not torch.sparse_coo,
            _extra_dispatch_keys=_AUTOCAST | (_COO if layout is torch.sparse_coo else _COMPRESSED),
        )
    tensor._inner = values
    tensor._gpu = gpu
    return tensor


def wrap_result(result: Any, gpu: VirtualGPU | None, operation: str) -> Any:
    """Wrap each tensor in a result; return numbers, and tensors on a real device, unchanged."""
    if isinstance(result, torch.Tensor):
        return result if gpu is None else wrap(result, gpu, operation)
    if isinstance(result, list | tuple):
        return type(result)([wrap_result(item, gpu, operation) for item in result])
    return result


def _wrap_arguments(
    info: OperatorInfo,
    aliases: Sequence[tuple[int, str] | None],
    result: Any,
    args: Args,
    kwargs: Kwargs,
    gpu: VirtualGPU | None,
) -> Any:
    """Return the results of an in-place or ``out=`` call: the very arguments that it wrote to."""
    several = len(aliases) > 1
    outputs = []
    for alias, item in zip(aliases, result if several else (result,), strict=True):
        if alias is None:
            outputs.append(wrap_result(item, gpu, info.name))
            continue
        written = argument(alias, args, kwargs)
        for tensor in written if isinstance(written, list | tuple) else (written,):
            if info.reshapes or tensor._inner.layout is not torch.strided:
                refresh(tensor, info.name)
        outputs.append(written)
    return tuple(outputs) if several else outputs[0]


def _refresh_unreturned(info: OperatorInfo, args: Args, kwargs: Kwargs) -> None:
    """Update the sizes of written but unreturned arguments, such as a quantization observer's."""
    for place in info.unreturned:
        written = argument(place, args, kwargs)
        if isinstance(written, VirtualTensor) and written._inner.size() != written.size():
            refresh(written, info.name)


def _clean_up(
    info: OperatorInfo, args: Args, kwargs: Kwargs, gpu: VirtualGPU | None, error: RuntimeError
) -> None:
    """Refresh what a failed operation modified; raise CUDA's error if memory ran out."""
    if info.reshapes:
        for alias in info.aliases or ():
            changed = None if alias is None else argument(alias, args, kwargs)
            if isinstance(changed, VirtualTensor):
                refresh(changed, info.name)
    if gpu is not None:
        refuse_host_memory(error, gpu)


def refresh(changed: VirtualTensor, operation: str) -> None:
    """After an in-place call, update a tensor's size, strides and bytes to those of its values."""
    values, gpu = changed._inner, changed._gpu
    for part in strided_parts(values):
        block = count_bytes(part, gpu, operation)
        try:
            block.resize(part.untyped_storage().nbytes(), operation)
        except torch.OutOfMemoryError:
            storage = part.untyped_storage()
            if part is values:  # restore the previous size
                part.set_(storage, changed.storage_offset(), changed.size(), changed.stride())
            storage.resize_(block.size_bytes)
            raise
    set_cpp_data(changed, wrap(values, gpu, operation))


def block_of(tensor: VirtualTensor) -> Block:
    """Return the block of memory that holds the tensor's values."""
    if tensor._block is not None:
        return tensor._block
    values = tensor._inner
    part = values if values.layout is torch.strided else strided_parts(values)[-1]
    return count_bytes(part, tensor._gpu, "unknown")


def make_shape(
    output: Output, gpu: Place, operation: str, base: VirtualTensor | None = None
) -> ShapeTensor:
    """Create a shape on ``gpu``; a view of ``base`` doesn't get its own block."""
    if base is not None and (inference := base.is_inference()) is not _in_inference_mode():
        # A view of a normal tensor is a normal tensor, even in inference mode.
        with torch.inference_mode(inference):
            return make_shape(output, gpu, operation, base)
    meta, size, stride, offset, dtype, storage_bytes = output
    shape = _make_wrapper(
        ShapeTensor,
        size,
        strides=stride,
        storage_offset=offset or None,  # passing 0 is slower
        dtype=dtype,
        device=gpu.cpp_device,
        _extra_dispatch_keys=_AUTOCAST_ON_HOST if gpu is HOST else _AUTOCAST,
    )
    if dtype.is_complex and meta.is_conj():
        torch._C._set_conj(shape, True)
    shape._inner = meta
    shape._gpu = gpu
    if isinstance(gpu, VirtualGPU):
        shape._block = (
            gpu.memory.allocate(storage_bytes, operation) if base is None else block_of(base)
        )
    return shape


def _wrap_shapes(
    info: OperatorInfo,
    args: Args,
    kwargs: Kwargs,
    inputs: Sequence[VirtualTensor],
    result: Result,
    gpu: Place,
) -> Any:
    """Return the results of a call on shapes: new shapes, and the arguments that it wrote to."""
    outputs: list[object] = []
    aliases = info.aliases or ()
    for position, output in enumerate(result.outputs):
        number = result.bases[position]
        alias = aliases[position] if position < len(aliases) else None
        if not isinstance(output, Output):
            outputs.append(output)
        elif alias is not None:
            changed = argument(alias, args, kwargs)
            if changed._inner is not output.meta:
                _reshape(changed, output, info.name)
            outputs.append(changed)
        else:
            base = None if number is None or inputs[number]._gpu is not gpu else inputs[number]
            outputs.append(make_shape(output, gpu, info.name, base))
    if result.form is None:
        return outputs[0] if outputs else None
    return result.form(outputs)


def _reshape(changed: ShapeTensor, output: Output, operation: str) -> None:
    """Update the size, strides and bytes of a shape that was modified in place.

    A block that is large enough keeps its size, except for ``set_``, which replaces the memory.
    """
    block = changed._block
    if block is not None and (output.storage_bytes > block.size_bytes or operation == "set_"):
        block.resize(output.storage_bytes, operation)
    set_cpp_data(changed, make_shape(output, changed._gpu, operation, changed))
    changed._inner = output.meta


def is_shape(value: object) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, ShapeTensor)
