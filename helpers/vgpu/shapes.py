"""``shapes_only()``: models of any size without arithmetic and without memory of their own.

A tensor made or moved in the block is a :class:`ShapeTensor`: it has a size, strides, a type, a
device and counted bytes, but no values. Devices, autograd, modules, optimizers, streams, memory
counters and recordings work as ever; whoever asks for a value gets a :class:`NoValueError`.

An operation's results are found once per signature, by torch's own functions for meta tensors, and
remembered. A shape on the host (``torch.empty(...)`` in the block) is a ShapeTensor as well; only
what Python or NumPy already holds (``torch.tensor([1, 2])``) stays real until it moves to a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.vgpu import gpus, recorder, signatures, tensor
from helpers.vgpu.costs import Work, work_of
from helpers.vgpu.gpus import VirtualGPU
from helpers.vgpu.rules import rule_for
from helpers.vgpu.tensor import VirtualTensor
from helpers.vgpu.traits import Traits, tensors_in, traits_of

_make_wrapper = torch.Tensor._make_wrapper_subclass
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore


class NoValueError(RuntimeError):
    """A value was asked of a tensor that is only a shape."""


class ShapeTensor(VirtualTensor):
    """A tensor without values, on a virtual GPU or on the host."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        raise _no_value(self, "numpy()")

    def __array__(self, dtype: Any = None) -> Any:
        raise _no_value(self, "numpy()")

    def tolist(self) -> Any:
        raise _no_value(self, "tolist()")

    def data_ptr(self) -> int:
        raise _no_value(self, "data_ptr()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"shape({list(self.size())}, device='{self.device}', dtype={self.dtype}"
            f"{', requires_grad=True' if self.requires_grad else ''})"
        )

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        result = memo[id(self)] = _new(self._inner, self._gpu, "deepcopy")
        result.requires_grad_(self.requires_grad)
        if hasattr(self, "_is_param"):
            result._is_param = True  # type: ignore[attr-defined]
        return result


class _Host:
    """Stands in for a GPU in a shape that lies on the host; its bytes are not counted."""

    index = -1
    device = cpp_device = torch.device("cpu")


_HOST: Any = _Host()


class _Mode(TorchDispatchMode):
    """Sends everything in the block here, factories on the host included."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


@contextmanager
def shapes_only() -> Iterator[None]:
    """In the block, tensors made, or moved to or computed on virtual GPUs, are shapes.

    RuntimeError where virtual GPUs are not enabled. A model that moves in the block loses its
    values for good.
    """
    if gpus.device_count() == 0:
        raise RuntimeError("shapes_only needs virtual GPUs: call vgpu.enable(count) first")
    with _Mode():
        yield


def is_shape(value: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, ShapeTensor)


class _Result:
    """What calls of one signature give back."""

    __slots__ = ("form", "metas", "work")

    def __init__(self, form: Any, metas: list[torch.Tensor | None], work: Work) -> None:
        self.form = form  # None for one tensor; else list or tuple
        self.metas = metas  # None where the result is None
        self.work = work


_results: dict[tuple, _Result] = {}


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one operation on shapes: only look up what comes out."""
    traits = traits_of(func)
    inputs: list[Any] = []
    _collect(args, inputs)
    if kwargs:
        _collect(kwargs.values(), inputs)
    gpu = _gpu_of(inputs, func, args, kwargs)
    target = _target(kwargs.get("device"), gpu)
    if target is None or (not inputs and _stays_real(func, args, kwargs, target)):
        return func(*args, **kwargs)
    if traits.copies:
        return _copy(traits, func, args, kwargs, inputs, target)
    if traits.waits or traits.name == "is_pinned":
        return _value(traits, inputs)
    written = traits.written(args, kwargs)
    for changed in written:
        _require_shape(changed, traits)
    active = recorder.active
    result = _results.get(key := signatures.signature(func, args, kwargs))
    if result is None:
        result = _results[key] = _learn(func, args, kwargs)
    placed = None
    if active is not None and isinstance(target, VirtualGPU):
        if traits.free:
            active.note_node(target)
        else:
            placed = active.place(target)
            stream, host, launch_s = placed
            active.accesses.check(traits.name, inputs, written, stream, host, launch_s)
    outputs = _outputs(traits, func, args, kwargs, result, target)
    if placed is not None:
        assert active is not None
        done = active.kernel(traits.name, target, *placed, result.work)
        active.accesses.note(done, inputs, [*written, *tensors_in(outputs)])
    return outputs


def _collect(values: Any, found: list[Any]) -> None:
    for value in values:
        if isinstance(value, VirtualTensor):
            found.append(value)
        elif type(value) is list or type(value) is tuple:
            _collect(value, found)


def _gpu_of(inputs: list[Any], func: Any, args: tuple, kwargs: dict) -> Any:
    """Where the inputs lie. Scalars on the host go with anything; else the devices must agree."""
    gpu = None
    for value in inputs:
        if value._gpu is not gpu:
            if gpu is not None:
                if not traits_of(func).copies:
                    rule_for(func).check(func, args, kwargs)
                gpu = value._gpu if gpu is _HOST else gpu
            else:
                gpu = value._gpu
    return gpu


def _target(device: Any, gpu: Any) -> Any:
    """The GPU of the results; None for a device that is neither virtual nor the host."""
    if device is None:
        return gpu or _HOST
    found = gpus.resolve(torch.device(device))
    if found is not None:
        return found
    return _HOST if torch.device(device).type == "cpu" else None


def _stays_real(func: Any, args: tuple, kwargs: dict, target: Any) -> bool:
    """Whether a call without virtual tensors is left alone: it computes with real values."""
    if target is not _HOST:
        return False
    from_values = next(tensors_in((args, tuple(kwargs.values()))), None) is not None
    return from_values or not rule_for(func).makes_on_device


def _outputs(
    traits: Traits, func: Any, args: tuple, kwargs: dict, result: _Result, target: Any
) -> Any:
    aliases = rule_for(func).aliases
    base = None
    if traits.view_of is not None:
        base = args[traits.view_of]
        base = base[0] if isinstance(base, list | tuple) else base
    outputs: list[Any] = []
    for position, meta in enumerate(result.metas):
        alias = aliases[position] if aliases is not None and position < len(aliases) else None
        if meta is None:
            outputs.append(None)
        elif alias is not None:
            index, name = alias
            argument = args[index] if index < len(args) else kwargs[name]
            if argument._inner is not meta:
                _become(argument, meta, traits.name)
            outputs.append(argument)
        else:
            outputs.append(_new(meta, target, traits.name, base))
    if result.form is None:
        return outputs[0] if outputs else None
    return result.form(outputs)


def _new(meta: torch.Tensor, gpu: Any, operation: str, base: Any = None) -> ShapeTensor:
    """A shape on ``gpu``; a view counts no bytes of its own."""
    made: Any = _make_wrapper(
        ShapeTensor,
        meta.size(),
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        device=gpu.cpp_device,
        _extra_dispatch_keys=_KEYS_ON_HOST if gpu is _HOST else _AUTOCAST,
    )
    if meta.is_conj():
        torch._C._set_conj(made, True)
    made._inner = meta
    made._gpu = gpu
    if gpu is not _HOST:
        if base is not None and base._gpu is gpu:
            made._block = tensor.block_of(base)
        else:
            made._block = gpu.memory.allocate(meta.untyped_storage().nbytes(), operation)
    return made


_KEYS_ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # type: ignore


def _become(argument: Any, meta: torch.Tensor, operation: str) -> None:
    """An in-place operation gave the tensor another size or other strides."""
    block = argument._block
    if block is not None:
        block.resize(meta.untyped_storage().nbytes(), operation)
    tensor.set_cpp_data(argument, _new(meta, argument._gpu, operation, argument))
    argument._inner = meta


def _learn(func: Any, args: tuple, kwargs: dict) -> _Result:
    """Run the operation on meta tensors, which torch has for nearly all, and keep what came."""
    args = _metas(args)
    kwargs = {name: _metas(value) for name, value in kwargs.items()}
    if "device" in kwargs or rule_for(func).makes_on_device:
        kwargs["device"] = torch.device("meta")
    kwargs.pop("pin_memory", None)
    if kwargs.get("generator") is not None:
        kwargs["generator"] = None
    result = func(*args, **kwargs)
    work = work_of(func, args, kwargs, result)
    if result is None or isinstance(result, torch.Tensor):
        form, items = None, [] if result is None else [result]
    else:
        form, items = type(result), list(result)
    for item in items:
        if item is not None and not isinstance(item, torch.Tensor):
            raise NoValueError(f"{func} gives a number, and there are only shapes")
    metas: list[torch.Tensor | None] = [
        None if item is None else signatures.interned(item) for item in items
    ]
    return _Result(form, metas, work)


def _metas(value: Any) -> Any:
    """Fresh meta tensors in place of tensors: the shared ones must never change."""
    if isinstance(value, torch.Tensor):
        inner = value._inner if isinstance(value, VirtualTensor) else value
        return _fresh(signatures.interned(inner))
    if type(value) in (list, tuple):
        return type(value)([_metas(item) for item in value])
    return value


def _fresh(shared: torch.Tensor) -> torch.Tensor:
    room = torch.empty(
        shared.untyped_storage().nbytes() // shared.element_size(),
        dtype=shared.dtype,
        device="meta",
    )
    fresh = room.as_strided(shared.size(), shared.stride(), shared.storage_offset())
    if shared.is_conj():
        torch._C._set_conj(fresh, True)
    return fresh


def _copy(
    traits: Traits, func: Any, args: tuple, kwargs: dict, inputs: list[Any], target: Any
) -> Any:
    """``_to_copy`` and ``copy_``, across devices or on one."""
    in_place = traits.name == "copy_"
    source = args[1] if in_place else args[0]
    if in_place:
        _require_shape(args[0], traits)
        made = args[0]
    else:
        plain = {n: v for n, v in kwargs.items() if n not in ("device", "non_blocking", "layout")}
        key = signatures.signature(func, args, plain)
        result = _results.get(key)
        if result is None:
            result = _results[key] = _learn(func, args, plain)
        meta = result.metas[0]
        assert meta is not None
        made = _new(meta, target, "copy")
    if recorder.active is not None:
        waits = not (kwargs.get("non_blocking") or (in_place and args[2:3] == (True,)))
        recorder.active.copied(source, made, in_place, waits)
    return made


def _value(traits: Traits, inputs: list[Any]) -> Any:
    if traits.name == "is_pinned":
        return False
    raise _no_value(inputs[0] if inputs else None, traits.name)


def _no_value(asked: Any, operation: str) -> NoValueError:
    what = "a tensor" if asked is None else f"a tensor of size {list(asked.size())}"
    where = "" if asked is None else f" on {asked.device}"
    name = {"_local_scalar_dense": "item()"}.get(operation, operation)
    return NoValueError(
        f"{name} needs the values of {what}{where}, but it is only a shape: it was made or moved "
        "in a vgpu.shapes_only() block, where nothing is computed. Ask for sizes, bytes and "
        "virtual time there, or run without shapes_only() to get values."
    )


def _require_shape(changed: Any, traits: Traits) -> None:
    if not isinstance(changed, ShapeTensor):
        raise RuntimeError(
            f"{traits.name} would change a tensor of size {list(changed.size())} on "
            f"{changed.device} that has values, and shapes_only() has none to put there: make "
            "the model, or move it to its GPU, in the block too"
        )
