"""Which module asks for an operation, in forward and in backward.

A name is the path below the outermost module that was called: ``layer1.0.conv1``. In backward it is
that of the module whose forward made the node of autograd's graph.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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


_next_node_number = torch._C._autograd._get_sequence_nr


class _OfThread(threading.local):
    last = -1  # the number of the last node that was seen
    is_fork = True  # whether the recording's own thread has started it


class Nodes:
    """The nodes of autograd's graphs in one recording: which module and which stream made them.

    Each thread numbers its own, so those of DataParallel's threads are kept apart.
    """

    def __init__(self) -> None:
        # Operation and module, by number.
        self._of_main: dict[int, tuple[str, str]] = {}
        self._of_forks: dict[int, tuple[str, str]] = {}
        # The index of a GPU and the number of a stream of its own, for nodes not on the default.
        self._streams: dict[int, tuple[int, int]] = {}
        self._of_thread = _OfThread()
        self._of_thread.is_fork = False
        self._of_thread.last = _next_node_number() - 1  # what was made before is none of these

    def note(self, operation: str, module: str, gpu: int, stream: int) -> None:
        """Remember the node that was made last, if it is new: torch makes it before the kernel.

        Without gradients as well: the node of a ``Function`` is made before its forward.
        """
        number, thread = _next_node_number() - 1, self._of_thread
        if number <= thread.last:
            return
        thread.last = number
        (self._of_forks if thread.is_fork else self._of_main)[number] = (operation, module)
        if stream:
            self._streams[number] = (gpu, stream)

    def running(self, gpu: int) -> tuple[str, int]:
        """The module of the node that runs, and the stream on which it runs on ``gpu``.

        The engine makes the stream of the node's forward current; on other GPUs the default ones
        stay so.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return "", 0
        number = node._sequence_nr()
        index, stream = self._streams.get(number, (gpu, 0))
        return self._module_of(node, number), stream if index == gpu else 0

    def _module_of(self, node: torch.autograd.graph.Node, number: int) -> str:
        noted = self._of_main.get(number)
        if not self._of_forks:
            return noted[1] if noted else ""
        # Another thread may have used the same number: the name must fit as well.
        name = node.name().lower()
        for candidate in (noted, self._of_forks.get(number)):
            if candidate and name.startswith(candidate[0].replace("_", "")):
                return candidate[1]
        return ""
