"""Classes in the place of torch's own, where C++ could not make an object for a virtual GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vgpu.changes import Changes
from vgpu.tensor import generators
from vgpu.time import streams


def install(changes: Changes) -> None:
    for name, make in (
        ("Generator", generators.make_generator),
        ("Stream", streams.make_stream),
        ("Event", streams.make_event),
    ):
        changes.wrap(torch, name, functools.partial(standing_for, make=make))


def standing_for(plain: Any, make: Callable[..., Any]) -> Any:
    """A class to put in the place of ``plain``.

    Calling it calls ``make``; ``isinstance`` and ``issubclass`` ask ``plain``; classes that a user
    derives from it are made as usual.
    """

    class StandIn(type(plain)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is stand_in:
                return make(*args, **kwargs)
            return super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return (
                isinstance(instance, plain)
                if cls is stand_in
                else type.__instancecheck__(cls, instance)
            )

        def __subclasscheck__(cls, other: type) -> bool:
            return (
                issubclass(other, plain) if cls is stand_in else type.__subclasscheck__(cls, other)
            )

    # Where pickle finds it, not where ``plain`` is from.
    stand_in = StandIn(plain.__name__, (plain,), {"__module__": "torch"})
    return stand_in
