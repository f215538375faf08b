"""``shapes_only()``: models of any size without arithmetic and without memory of their own.

A tensor made or moved in the block is a :class:`ShapeTensor`: it has a size, strides, a type, a
device and counted bytes, but no values. Devices, autograd, modules, optimizers, streams, memory
counters and recordings work as ever; whoever asks for a value gets a :class:`NoValueError`.

A shape on the host (``torch.empty(...)`` in the block) is a ShapeTensor as well; only what Python
or NumPy already holds (``torch.tensor([1, 2])``) stays real until it moves to a GPU.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.vgpu.changes import Changes
from helpers.vgpu.device import gpus
from helpers.vgpu.dispatch import tensor
from helpers.vgpu.dispatch.rules import decompose, rule_for
from helpers.vgpu.dispatch.tensor import VirtualTensor
from helpers.vgpu.shape_results import Output, Result, learn
from helpers.vgpu.timing import recording, signatures
from helpers.vgpu.timing.traits import Traits, tensors_in, traits_of

_make_wrapper = torch.Tensor._make_wrapper_subclass
_KEYS_ON_GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore
_KEYS_ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # type: ignore


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
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return f"shape({list(self.size())}, device='{self.device}', dtype={self.dtype}{gradient})"

    def _copied(self, memo: dict) -> Any:
        block = self._block
        base = None if block is None else memo.get(id(block))
        result = _new(Output.of(self._inner), self._gpu, "deepcopy", base)
        if block is not None:
            memo.setdefault(id(block), result)
        return result


class _Host:
    """Stands in for a GPU in a shape that lies on the host; its bytes are not counted."""

    index = -1
    device = cpp_device = torch.device("cpu")


_HOST: Any = _Host()


class _Mode(TorchDispatchMode):
    """Sends everything in the block here, factories on the host included."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the guard against it takes longer than we do

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {}, self)


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


def install(changes: Changes) -> None:
    changes.wrap(torch.nn.init, "_no_grad_trunc_normal_", trunc_normal)


def trunc_normal(plain: Callable) -> Callable:
    """``nn.init.trunc_normal_``, which draws until every value lies inside: a shape has none."""

    @functools.wraps(plain)
    def _no_grad_trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if is_shape(tensor) else plain(tensor, *args, **kwargs)

    return _no_grad_trunc_normal_


def is_shape(value: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, ShapeTensor)


# What shapes answer to questions that need no values.
_ANSWERS = {
    "_has_compatible_shallow_copy_type": True,
    "is_pinned": False,
    "record_stream": None,  # a block is never reused while an operation still needs it
}


class _Operator:
    """What must be known about an operator, read at its first call."""

    __slots__ = (
        "aliases",
        "check",
        "composite",
        "copies",
        "func",
        "indexes",
        "makes",
        "traits",
        "values",
    )

    def __init__(self, func: Any) -> None:
        rule = rule_for(func)
        self.func = func  # also keeps its id from another
        self.traits = traits_of(func)
        self.aliases = rule.aliases
        self.check = rule.check
        self.composite = rule.composite
        self.makes = rule.makes_on_device
        self.copies = self.traits.copies
        self.indexes = func._schema.name == "aten::index"
        self.values = self.traits.waits or self.traits.name in _ANSWERS


# By id: hashing an operator is slow.
_operators: dict[int, _Operator] = {}
_results: dict[tuple, Result] = {}


def dispatch(func: Any, args: tuple, kwargs: dict, mode: _Mode | None = None) -> Any:
    """Run one operation on shapes: only look up what comes out.

    mode: the block that the call came through, which C++ switches off meanwhile.
    """
    operator = _operators.get(id(func))
    if operator is None:
        operator = _operators[id(func)] = _Operator(func)
    if operator.composite:
        with mode or nullcontext():
            return decompose(func, args, kwargs)
    key: list[Any] = [id(func)]
    inputs: list[Any] = []
    _read(args, key, inputs, operator.makes)
    device = None
    for name, value in kwargs.items():
        if name == "device":
            device = value
        elif name not in signatures.NO_MATTER:
            key.append(name)
            _read((value,), key, inputs, operator.makes)
    gpu = None
    for value in inputs:
        if value._gpu is not gpu:
            gpu = value._gpu if gpu is None else _of_both(operator, gpu, value._gpu, args, kwargs)
    if device is not None or gpu is None:
        gpu = _target(device, gpu)
        if gpu is None or (not inputs and _stays_real(operator, args, kwargs, gpu)):
            return func(*args, **kwargs)
    if operator.copies:
        return _copy(operator, args, kwargs, key, gpu)
    if operator.values and not (operator.indexes and _by_integers(args)):
        if operator.traits.records_stream and recording.under_way is not None:
            recording.under_way.record_stream(*args)
        return _value(operator.traits, inputs)
    traits = operator.traits
    written: list[Any] = traits.written(args, kwargs) if traits.writes else []
    for changed in written:
        if type(changed) is not ShapeTensor:
            raise _has_values(changed, traits)
    result = _results.get(signature := tuple(key))
    if result is None:
        result = _results[signature] = learn(func, args, kwargs)
    done, now = None, recording.under_way
    if now is not None and gpu is not _HOST:
        done = now.operation(traits, gpu, inputs, written, result.work)
    return _outputs(operator, args, kwargs, inputs, result, gpu, done)


def _read(values: Any, key: list[Any], inputs: list[Any], with_floats: bool) -> None:
    """Append the values' part of the signature (signatures.py), and the virtual tensors.

    Here once more because reading the arguments is most of what a shape costs.
    """
    for value in values:
        kind = type(value)
        if kind is ShapeTensor:
            inputs.append(value)
            key.append(id(value._inner))
        elif value is None:
            key.append(None)
        elif kind is list or kind is tuple:
            if value and type(value[0]) is int:
                key.append(tuple(value))
            else:
                key.append(len(value))
                _read(value, key, inputs, True)
        elif kind is float and not with_floats:
            key.append(float)
        elif isinstance(value, torch.Tensor):
            if isinstance(value, VirtualTensor):
                inputs.append(value)
                value = value._inner
            key.append(id(signatures.interned(value)))
        else:
            key.append(kind)
            key.append(value)


def _of_both(operator: _Operator, gpu: Any, other: Any, args: tuple, kwargs: dict) -> Any:
    """The GPU of an operation on tensors of two devices; the error of CUDA where it has none."""
    if not operator.copies:
        operator.check(operator.func, args, kwargs)
    return other if gpu is _HOST else gpu


def _target(device: Any, gpu: Any) -> Any:
    """The GPU of the results; None for a device that is neither virtual nor the host."""
    if device is None:
        return gpu or _HOST
    found = gpus.resolve(torch.device(device))
    if found is not None:
        return found
    return _HOST if torch.device(device).type == "cpu" else None


def _stays_real(operator: _Operator, args: tuple, kwargs: dict, target: Any) -> bool:
    """Whether a call without virtual tensors is left alone: it computes with real values."""
    if target is not _HOST:
        return False
    from_values = next(tensors_in((args, tuple(kwargs.values()))), None) is not None
    return from_values or not operator.makes


def _by_integers(args: tuple) -> bool:
    """Whether indices are integers, so that their number is the results'; a mask is counted out."""
    return all(index is None or index.dtype in (torch.int64, torch.int32) for index in args[1])


def _outputs(
    operator: _Operator,
    args: tuple,
    kwargs: dict,
    inputs: list[Any],
    result: Result,
    gpu: Any,
    done: Any,
) -> Any:
    """The tensors that a call gives back; in a recording ``done`` wrote them."""
    aliases = operator.aliases
    outputs: list[Any] = []
    for position, output in enumerate(result.outputs):
        alias = aliases[position] if aliases is not None and position < len(aliases) else None
        if not isinstance(output, Output):
            outputs.append(output)
        elif alias is not None:
            index, name = alias
            argument = args[index] if index < len(args) else kwargs[name]
            if argument._inner is not output.meta:
                _become(argument, output, operator.traits.name)
            outputs.append(argument)
        else:
            number = result.bases[position]
            base = None if number is None or inputs[number]._gpu is not gpu else inputs[number]
            made = _new(output, gpu, operator.traits.name, base)
            if done is not None:
                made._block.made = done
            outputs.append(made)
    if result.form is None:
        return outputs[0] if outputs else None
    return result.form(outputs)


def _new(output: Output, gpu: Any, operation: str, base: Any = None) -> Any:
    """A shape on ``gpu``; a view of ``base`` counts no bytes of its own."""
    meta, size, stride, offset, dtype, storage_bytes = output
    made: Any = _make_wrapper(
        ShapeTensor,
        size,
        strides=stride,
        storage_offset=offset,
        dtype=dtype,
        device=gpu.cpp_device,
        _extra_dispatch_keys=_KEYS_ON_HOST if gpu is _HOST else _KEYS_ON_GPU,
    )
    if dtype.is_complex and meta.is_conj():
        torch._C._set_conj(made, True)
    made._inner = meta
    made._gpu = gpu
    if gpu is not _HOST:
        if base is None:
            made._block = gpu.memory.allocate(storage_bytes, operation)
        else:
            made._block = tensor.block_of(base)
    return made


def _become(argument: Any, output: Output, operation: str) -> None:
    """An in-place operation gave the tensor another size or other strides."""
    block = argument._block
    if block is not None:
        block.resize(output.storage_bytes, operation)
    tensor.set_cpp_data(argument, _new(output, argument._gpu, operation, argument))
    argument._inner = output.meta


def _copy(operator: _Operator, args: tuple, kwargs: dict, key: list[Any], target: Any) -> Any:
    """``_to_copy`` and ``copy_``, across devices or on one."""
    in_place = operator.traits.name == "copy_"
    if in_place:
        made, source = args[:2]
        if type(made) is not ShapeTensor:
            raise _has_values(made, operator.traits)
    else:
        source = args[0]
        result = _results.get(signature := tuple(key))
        if result is None:
            plain = {name: v for name, v in kwargs.items() if name not in signatures.NO_MATTER}
            result = _results[signature] = learn(operator.func, args, plain)
        assert isinstance(result.outputs[0], Output)
        made = _new(result.outputs[0], target, "copy")
    if recording.under_way is not None:
        waits = not (kwargs.get("non_blocking") or (in_place and args[2:3] == (True,)))
        recording.under_way.check_source(source)
        recording.under_way.copied(source, made, in_place, waits)
    return made


def _value(traits: Traits, inputs: list[Any]) -> Any:
    if traits.name in _ANSWERS:
        return _ANSWERS[traits.name]
    raise _no_value(inputs[0], traits.name)


def _no_value(asked: torch.Tensor, operation: str) -> NoValueError:
    name = "item()" if operation == "_local_scalar_dense" else operation
    return NoValueError(
        f"{name} needs the values of a tensor of size {list(asked.size())} on {asked.device}, but "
        "it is only a shape: it was made or moved in a vgpu.shapes_only() block, where nothing is "
        "computed. Ask for sizes, bytes and virtual time there, or run without shapes_only() to "
        "get values."
    )


def _has_values(changed: torch.Tensor, traits: Traits) -> RuntimeError:
    return RuntimeError(
        f"{traits.name} would change a tensor of size {list(changed.size())} on {changed.device} "
        "that has values, and shapes_only() has none to put there: make the model, or move it to "
        "its GPU, in the block too"
    )
