"""torch's operators as this package sees them: their type, and how a call fills their schema."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

# What an operator takes is arbitrary, and so is what it gives back.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Operator(Protocol):
    """One of torch's operators (``torch._ops.OpOverload``): what is asked of it here."""

    @property
    def tags(self) -> list[torch.Tag]: ...

    @property
    def _schema(self) -> torch._C.FunctionSchema: ...

    @property
    def _overloadpacket(self) -> object: ...

    def name(self) -> str: ...

    def _op_dk(self, key: torch._C.DispatchKey, /, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...


# What runs the calls of an operator.
Handler = Callable[[Operator, Args, Kwargs], Any]


def named_arguments(func: Operator, args: Args, kwargs: Kwargs) -> Kwargs:
    """All arguments of a call by their names; those with a default only where they are given."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def argument(place: tuple[int, str], args: Args, kwargs: Kwargs) -> Any:
    """The argument at a position, or of a name where fewer are given by position."""
    position, name = place
    return args[position] if position < len(args) else kwargs[name]


def overloads(packet: Any) -> list[Operator]:
    """The overloads of an operator, which ``torch.ops`` hands out as one packet."""
    return [getattr(packet, name) for name in packet.overloads()]


def operator_of_aten(name: str) -> Operator:
    """One of aten's operators, by "name" or "name.overload"."""
    packet, _, overload = name.partition(".")
    func: Operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return func


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
