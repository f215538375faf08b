"""Who issues an operation: which thread, on which stream, in which module, forward or backward.

A module's name is its path below the outermost module that was called: ``layer1.0.conv1``. In
backward it is that of the module whose forward made the node of autograd's graph.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from vgpu.memory import gpus
from vgpu.memory.gpus import (
    VirtualGPU,
    current_stream_number,
    in_backward,
    set_stream_number,
    stream_number_of_node,
)
from vgpu.time.happens_before import RecordedStream
from vgpu.time.recorder import Recorder
from vgpu.time.threads import HostThread


class CallSites:
    """Who issues the operations of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nodes = _Nodes()

    def of(
        self, name: str, gpu: VirtualGPU, note: bool = True
    ) -> tuple[RecordedStream, HostThread]:
        """The stream of the next operation on ``gpu``, and the thread that issues it.

        Sets the thread's module. note: False for the source of a copy, whose backward runs on the
        target's stream.
        """
        if in_backward():
            return self._of_backward(name, gpu, note)
        host = self._recorder.host()
        number = set_stream_number(gpu.index) or 0
        host.module, host.backward = current_module(), False
        if note:
            self._nodes.note(name, host.module, gpu.index, number)
        return self._recorder.stream(gpu, number), host

    def _of_backward(
        self, name: str, gpu: VirtualGPU, note: bool
    ) -> tuple[RecordedStream, HostThread]:
        threads = self._recorder.threads
        threads.begin_pass_if_new()
        module = self._nodes.module_of_running()
        if torch._C._current_autograd_node() is None:  # behind the last one, in a callback
            threads.join_callers_streams()
        engine = threads.engine(gpu.index)
        engine.module, engine.backward = module, True
        number_set = set_stream_number(gpu.index)
        number = stream_number_of_node(gpu.index) if number_set is None else number_set
        if note:  # with create_graph, or in a checkpoint that computes its part again
            self._nodes.note(name, current_module() or module, gpu.index, number)
        stream = self._recorder.stream(gpu, number)
        if number_set is None:
            threads.note_stream(gpu, stream)
        return stream, engine

    def note(self, name: str, gpu: VirtualGPU) -> None:
        """An operation launches nothing, but its node has a module and a stream as well."""
        self._nodes.note(name, current_module(), gpu.index, current_stream_number(gpu.index))


# Modules


class _Stack(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.of_module: dict[int, str] = {}


_stack = _Stack()


def current_module() -> str:
    """The innermost module that is running in this thread; empty outside every module."""
    names = _stack.names
    return names[-1] if names else ""


@contextmanager
def modules_tracked() -> Iterator[None]:
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
        # Read again at each outermost call: a module may have changed, or its id be another's.
        _stack.of_module = {id(part): name for name, part in module.named_modules()}
    name = _stack.of_module.get(id(module))
    _stack.names.append(name if name else type(module).__name__)


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    if _stack.names:
        _stack.names.pop()


# Nodes of autograd's graph

_next_node_number = torch._C._autograd._get_sequence_nr


class _OfThread(threading.local):
    last = -1  # the number of the last node that was seen
    is_fork = True  # whether the recording's own thread has started it


class _Nodes:
    """The nodes of autograd's graphs in one recording: which module and which stream made them.

    Each thread numbers its own, so those of DataParallel's threads are kept apart.
    """

    def __init__(self) -> None:
        # Operation and module, by number.
        self._of_main: dict[int, tuple[str, str]] = {}
        self._of_forks: dict[int, tuple[str, str]] = {}
        gpus.streams_of_nodes.clear()
        self._of_thread = _OfThread()
        self._of_thread.is_fork = False
        self._of_thread.last = _next_node_number() - 1  # those before are none of these

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
            gpus.streams_of_nodes[number] = (gpu, stream)

    def module_of_running(self) -> str:
        """The module of the node that runs; empty behind the last one."""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        noted = self._of_main.get(node._sequence_nr())
        if not self._of_forks:
            return noted[1] if noted else ""
        # Another thread may have used the same number: the name must fit as well.
        name = node.name().lower()
        for candidate in (noted, self._of_forks.get(node._sequence_nr())):
            if candidate and name.startswith(candidate[0].replace("_", "")):
                return candidate[1]
        return ""
