"""Which module is running: names for what a recording sees.

A name is the path below the outermost module that was called: ``layer1.0.conv1``.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


class _Stack(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.of_module: dict[int, str] = {}


_stack = _Stack()


def current() -> str:
    """The innermost module that is running in this thread; empty outside every module."""
    names = _stack.names
    return names[-1] if names else ""


@contextmanager
def tracked() -> Iterator[None]:
    """Follow every module's forward while the block runs."""
    # always_call: also a forward that raises must leave the stack.
    handles = [
        torch_module.register_module_forward_pre_hook(_enter),
        torch_module.register_module_forward_hook(_leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _stack.names.clear()


def _enter(module: nn.Module, inputs: Any) -> None:
    if not _stack.names:
        # Read anew at each outermost call: a module may have changed, or its id be another's.
        _stack.of_module = {id(part): name for name, part in module.named_modules()}
    name = _stack.of_module.get(id(module))
    _stack.names.append(name if name else type(module).__name__)


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    if _stack.names:
        _stack.names.pop()
