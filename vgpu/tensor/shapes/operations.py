"""What happens when torch computes with shapes: what comes out is looked up, not computed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from vgpu.memory import gpus
from vgpu.tensor.operators import Args, Kwargs, Operator, argument
from vgpu.tensor.rules import rule_for
from vgpu.tensor.same_device import INDEXING
from vgpu.tensor.shapes import shape
from vgpu.tensor.shapes.results import Result, learn
from vgpu.tensor.shapes.shape import HOST, Host, Output, Place, ShapeTensor, no_value
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time import recording, signatures
from vgpu.time.happens_before import Enqueued
from vgpu.time.traits import Traits, tensors_in, traits_of

# What shapes answer to questions that need no values.
_ANSWERS = {
    "_has_compatible_shallow_copy_type": True,
    "is_pinned": False,
    "record_stream": None,  # a block is never reused while an operation still needs it
}


class _Facts:
    """What must be known about an operator, read at its first call."""

    __slots__ = (
        "aliases",
        "check",
        "copies",
        "divides",
        "func",
        "makes",
        "only_computes",
        "parts",
        "scales",
        "special",
        "traits",
        "values",
    )

    def __init__(self, func: Operator) -> None:
        rule = rule_for(func)
        self.func = func  # also keeps its id from another
        self.traits = traits_of(func)
        self.aliases = rule.aliases
        self.check = rule.check
        # A mask has no values here to make integers of: what indexes stays one operator.
        self.divides = None if func._schema.name in INDEXING else rule.divides
        self.parts = rule.parts
        self.makes = rule.makes_on_device
        # Whether a fraction in a list may decide a size (upsample); foreach has a factor for each tensor.
        self.scales = not func._schema.name.startswith("aten::_foreach_")
        self.copies = self.traits.copies
        self.special = _handlers.get(func._schema.name)
        self.values = self.traits.waits or self.traits.name in _ANSWERS
        # Whether all that can come is new tensors: asked at once, for most of what there is.
        self.only_computes = not (
            self.special or self.copies or self.values or self.traits.writes or self.aliases
        )


class ShapeCall(NamedTuple):
    """One call on shapes, as a handler gets it."""

    facts: _Facts
    args: Args
    kwargs: Kwargs
    signature: tuple[object, ...]
    inputs: list[VirtualTensor]
    gpu: Place
    mode: AbstractContextManager[object]  # the block's, which C++ switches off meanwhile

    @property
    def func(self) -> Operator:
        return self.facts.func


ShapeHandler = Callable[[ShapeCall], Any]
_handlers: dict[str, ShapeHandler] = {}


def use_handlers(handlers: Mapping[str, ShapeHandler]) -> None:
    """Let each of ``handlers`` run the operator whose name is its key, on shapes."""
    _handlers.update(handlers)
    _facts.clear()


def results_of(call: ShapeCall) -> Any:
    """What the operator gives back, made but not recorded."""
    result = _results.get(call.signature)
    if result is None:
        result = _results[call.signature] = learn(call.func, call.args, call.kwargs)
    return _outputs(call.facts, call.args, call.kwargs, call.inputs, result, call.gpu, None)


host_keeps_values = False
"""Whether a shape that is copied to a tensor with values, on the host, leaves it as it is."""

# By id: hashing an operator is slow.
_facts: dict[int, _Facts] = {}
_results: dict[tuple[object, ...], Result] = {}


def dispatch(
    func: Operator,
    args: Args,
    kwargs: Kwargs,
    mode: AbstractContextManager[object] | None = None,
) -> Any:
    """Run one operation on shapes: only look up what comes out.

    mode: the block that the call came through, which C++ switches off meanwhile.
    """
    number = id(func)
    facts = _facts.get(number)
    if facts is None:
        facts = _facts[number] = _Facts(func)
    if facts.divides is not None and facts.divides(args, kwargs):
        with mode or nullcontext():
            return facts.parts(func, args, kwargs)
    key: list[object] = [number]
    inputs: list[VirtualTensor] = []
    for value in args:
        if type(value) is ShapeTensor:  # here once more: a call takes longer
            inputs.append(value)
            key.append(id(value._inner))
        else:
            _read((value,), key, inputs, facts.makes, facts.scales)
    device = None
    for name, value in kwargs.items() if kwargs else ():
        if name == "device":
            device = value
        elif name not in signatures.NO_MATTER:
            key.append(name)
            _read((value,), key, inputs, facts.makes, facts.scales)
    gpu: Place | None = None
    for value in inputs:
        if value._gpu is not gpu:
            gpu = value._gpu if gpu is None else _of_both(facts, gpu, value._gpu, args, kwargs)
    if device is not None or gpu is None:
        gpu = _target(device, gpu)
        if gpu is None or (not inputs and _stays_real(facts, args, kwargs, gpu)):
            return func(*args, **kwargs)
    traits = facts.traits
    written: list[ShapeTensor] = []
    if not facts.only_computes:
        if facts.special is not None:
            off = mode or nullcontext()
            return facts.special(ShapeCall(facts, args, kwargs, tuple(key), inputs, gpu, off))
        if facts.copies:
            return _copy(facts, args, kwargs, key, gpu)
        if facts.values and (not traits.indexes or traits.waits_for(args)):
            if traits.records_stream and recording.under_way is not None:
                recording.under_way.record_stream(*args)
            return _value(traits, inputs)
        if traits.writes:
            for changed in traits.written(args, kwargs):
                if type(changed) is not ShapeTensor:
                    raise _has_values(changed, traits)
                written.append(changed)
    result = _results.get(signature := tuple(key))
    if result is None:
        result = _results[signature] = learn(func, args, kwargs)
    done, now = None, recording.under_way
    if now is not None and not isinstance(gpu, Host):
        waits = traits.indexes and traits.waits_for(args)
        done = now.operation(traits, gpu, inputs, written, result.work, waits)
    if result.alone is not None and facts.only_computes:
        made = shape.make(result.alone, gpu, traits.name)
        if done is not None and made._block is not None:
            made._block.made = done
        return made
    return _outputs(facts, args, kwargs, inputs, result, gpu, done)


def _read(
    values: Iterable[Any],
    key: list[object],
    inputs: list[VirtualTensor],
    with_floats: bool,
    in_lists: bool,
) -> None:
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
                _read(value, key, inputs, in_lists, in_lists)
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


def _of_both(facts: _Facts, gpu: Place, other: Place, args: Args, kwargs: Kwargs) -> Place:
    """The GPU of an operation on tensors of two devices; the error of CUDA where it has none."""
    if not facts.copies:
        facts.check(facts.func, args, kwargs)
    return other if gpu is HOST else gpu


def _target(device: torch.device | str | None, gpu: Place | None) -> Place | None:
    """The GPU of the results; None for a device that is neither virtual nor the host."""
    if device is None:
        return gpu or HOST
    found = gpus.resolve(torch.device(device))
    if found is not None:
        return found
    return HOST if torch.device(device).type == "cpu" else None


def _stays_real(facts: _Facts, args: Args, kwargs: Kwargs, target: Place) -> bool:
    """Whether a call without virtual tensors is left alone: it computes with real values."""
    if target is not HOST:
        return False
    from_values = next(tensors_in((args, tuple(kwargs.values()))), None) is not None
    return from_values or not facts.makes or _makes_integers(facts, args, kwargs)


# Without a dtype these make integers of integers, or always.
_OF_INTEGERS = {"arange", "full", "randint", "randperm", "tril_indices", "triu_indices"}


def _makes_integers(facts: _Facts, args: Args, kwargs: Kwargs) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    numbers = [number for number in args if not isinstance(number, list | tuple)]
    return facts.traits.name in _OF_INTEGERS and all(isinstance(n, int) for n in numbers)


def _outputs(
    facts: _Facts,
    args: Args,
    kwargs: Kwargs,
    inputs: Sequence[VirtualTensor],
    result: Result,
    gpu: Place,
    done: Enqueued | None,
) -> Any:
    """The tensors that a call gives back; in a recording ``done`` wrote them."""
    aliases = facts.aliases
    outputs: list[object] = []
    for position, output in enumerate(result.outputs):
        alias = aliases[position] if aliases is not None and position < len(aliases) else None
        if alias is not None and isinstance(output, Output):
            changed = argument(alias, args, kwargs)
            if changed._inner is not output.meta:
                shape.become(changed, output, facts.traits.name)
            outputs.append(changed)
        else:
            outputs.append(_made(facts, output, result.bases[position], inputs, gpu, done))
    if result.form is None:
        return outputs[0] if outputs else None
    return result.form(outputs)


def _made(
    facts: _Facts,
    output: Output | int | None,
    number: int | None,
    inputs: Sequence[VirtualTensor],
    gpu: Place,
    done: Enqueued | None,
) -> object:
    """A new tensor, which may view the input of a number; a number or None stands for itself."""
    if type(output) is not Output:
        return output
    base = None if number is None or inputs[number]._gpu is not gpu else inputs[number]
    made = shape.make(output, gpu, facts.traits.name, base)
    if done is not None and made._block is not None:
        made._block.made = done
    return made


def _copy(facts: _Facts, args: Args, kwargs: Kwargs, key: Sequence[object], target: Place) -> Any:
    """``_to_copy`` and ``copy_``, across devices or on one."""
    in_place = facts.traits.name == "copy_"
    if in_place:
        made, source = args[:2]
        if type(made) is not ShapeTensor:
            if host_keeps_values:
                return made
            raise _has_values(made, facts.traits)
    else:
        source = args[0]
        result = _results.get(signature := tuple(key))
        if result is None:
            plain = {name: v for name, v in kwargs.items() if name not in signatures.NO_MATTER}
            result = _results[signature] = learn(facts.func, args, plain)
        assert isinstance(result.outputs[0], Output)
        made = shape.make(result.outputs[0], target, "copy")
    if recording.under_way is not None:
        waits = not (kwargs.get("non_blocking") or (in_place and args[2:3] == (True,)))
        recording.under_way.check_source(source)
        recording.under_way.copied(source, made, in_place, waits)
    return made


def _value(traits: Traits, inputs: Sequence[VirtualTensor]) -> object:
    if traits.name in _ANSWERS:
        return _ANSWERS[traits.name]
    raise no_value(inputs[0], traits.name)


def _has_values(changed: torch.Tensor, traits: Traits) -> RuntimeError:
    return RuntimeError(
        f"{traits.name} would change a tensor of size {list(changed.size())} on {changed.device} "
        "that has values, and shapes_only() has none to put there: make the model, or move it to "
        "its GPU, in the block too"
    )


shape.run_with(dispatch)
