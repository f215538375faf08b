"""Finds out who issues an operation: which host thread, on which stream, in which module and pass.

The host has multiple threads: the main thread, DataParallel's threads, and the autograd engine's,
one per GPU, which launch operations from C++, without the GIL. No callback reports that
``backward()`` has returned, so the next operation, issued by its caller or in another pass, makes
the caller's thread and streams wait for the pass.

A module's name is its path below the outermost module that was called: ``layer1.0.conv1``. In a
backward pass, an operation's module is the one whose forward created the autograd node.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from vgpu.memory import gpus
from vgpu.memory.gpus import (
    VirtualGPU,
    callers_stream_number,
    current_stream_number,
    graph_task,
    in_backward,
    set_stream_number,
    stream_number_of_node,
)
from vgpu.time.steps import Issuer

if TYPE_CHECKING:  # program.py imports this file
    from vgpu.time.program import GrowingProgram, RecordedStream


# Threads


class HostThread:
    """One thread of the host."""

    __slots__ = ("by", "compiled", "index", "number")

    def __init__(self, index: int, number: int, backward: bool) -> None:
        self.index = index  # among the threads of the recording
        self.number = number  # its row in a trace
        self.by = Issuer(index, "", backward)  # the issuer of its next operation
        self.compiled = False  # whether its next operation was compiled by torch.compile

    def enter(self, module: str, compiled: bool) -> None:
        """Set the next operation's module; ``compiled`` says whether torch.compile compiled it."""
        self.compiled = compiled
        if self.by.module != module:
            self.by = Issuer(self.index, module, self.by.backward)


class _Thread(threading.local):
    host: HostThread


class HostThreads:
    """The threads of one recording, and its backward passes."""

    def __init__(self, program: "GrowingProgram") -> None:
        self._program = program
        self.main = program.begin_thread(0, None, 1)
        self._engines: dict[int, HostThread] = {}  # by GPU, in the last backward pass
        self._of_thread = _Thread()
        self._of_thread.host = self.main
        self._parent = self.main  # new threads start at its current time
        self._sharing = 1
        self._forked: list[HostThread] = []
        self._last_pass = _BackwardPass(-1, 0)  # running or finished
        # The streams used by the last pass, each with the caller's current stream on the same GPU.
        self._callers_streams: dict[RecordedStream, RecordedStream] = {}

    def issuing(self) -> HostThread:
        """Return the calling thread; in a backward pass, the engine's thread that runs the node."""
        if in_backward():
            self.begin_pass_if_new()
            return self.engine(gpus.current_index())
        self.end_pass_if_returned()
        return self._current()

    def _current(self) -> HostThread:
        """Return the calling thread; a new one starts at its parent's current time."""
        try:
            return self._of_thread.host
        except AttributeError:
            number = gpus.current_index() + 1
            host = self._program.begin_thread(number, self._parent, self._sharing)
            self._of_thread.host = host
            self._forked.append(host)
            return host

    def engine(self, index: int) -> HostThread:
        """Return the autograd engine's thread for the GPU ``index``."""
        engine = self._engines.get(index)
        if engine is None:
            caller = getattr(self._of_thread, "host", self.main)
            engine = self._program.begin_thread(caller.number, caller, 0)
            self._engines[index] = engine
        return engine

    # DataParallel

    def fork(self, caller: HostThread, threads: int) -> None:
        """Make threads that appear from now on start at the caller's current time.

        They share one GIL equally. Each thread's share is computed, not simulated turn by turn, so
        nothing depends on how the real threads interleave.
        """
        self._parent = self._program.begin_thread(0, caller, 1)
        self._sharing = threads

    def join(self, caller: HostThread) -> None:
        """Make the caller wait for all threads started since ``fork``."""
        self._program.join_threads(caller, self._forked)
        self._forked.clear()
        self._parent, self._sharing = self.main, 1

    # Backward passes

    def begin_pass_if_new(self) -> None:
        """Begin a new backward pass if the engine is about to launch the pass's first operation."""
        if self._last_pass.has_ended and self._last_pass.number != graph_task():
            self._end_pass()
        if not self._engines:
            self._last_pass = _BackwardPass(graph_task(), threading.get_ident())
            torch.autograd.Variable._execution_engine.queue_callback(self._last_pass.end)

    def end_pass_if_returned(self) -> None:
        """If a backward pass called by this thread has returned, make the thread wait for it."""
        mine = self._engines and self._last_pass.thread == threading.get_ident()
        if mine and not in_backward():
            self._end_pass()

    def _end_pass(self) -> None:
        self._program.join_threads(self._current(), self._engines.values())
        self._engines.clear()
        self.join_callers_streams()

    def note_stream(self, gpu: VirtualGPU, stream: "RecordedStream") -> None:
        """Remember that the engine enqueues work on this stream of ``gpu``."""
        if stream not in self._callers_streams:
            number = callers_stream_number(gpu.index)
            self._callers_streams[stream] = self._program.stream(gpu, number)

    def join_callers_streams(self) -> None:
        """Make the caller's streams wait for the streams on which a pass computed gradients."""
        ended, self._callers_streams = self._callers_streams, {}
        for stream in sorted(ended, key=lambda s: (s.device.index, s.number)):
            current = ended[stream]
            if current is not stream:
                self._program.wait_stream(current, stream)


@dataclass
class _BackwardPass:
    number: int  # of autograd's graph task
    thread: int  # the one that called backward()
    has_ended: bool = False

    def end(self) -> None:
        self.has_ended = True


# Modules


class _Stack(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.of_module: dict[int, str] = {}
        self.compiled_calls = 0


_stack = _Stack()


def current_module() -> str:
    """Return the name of this thread's innermost running module; empty outside any module."""
    names = _stack.names
    return names[-1] if names else ""


@contextmanager
def compiled_call() -> Iterator[None]:
    """Treat this thread's operations in the block, and their backward, as compiled code."""
    _stack.compiled_calls += 1
    try:
        yield
    finally:
        _stack.compiled_calls -= 1


def in_compiled_call() -> bool:
    return _stack.compiled_calls > 0


@contextmanager
def modules_tracked() -> Iterator[None]:
    """Track which module is running, with global hooks."""
    # always_call: a module whose forward raises must be removed from the stack, too.
    handles = [
        torch_module.register_module_forward_pre_hook(_enter),
        torch_module.register_module_forward_hook(_leave, always_call=True),
    ]
    try:
        with warnings.catch_warnings():
            # A compiled module warns that global hooks also run for its wrapper; _enter handles
            # that.
            message = r"Using `torch\.compile\(module\)` when there are global hooks"
            warnings.filterwarnings("ignore", message)
            yield
    finally:
        for handle in handles:
            handle.remove()
        _stack.names.clear()


_COMPILED = "_orig_mod"  # the original module inside torch.compile's wrapper


def _enter(module: nn.Module, inputs: Any) -> None:
    if not _stack.names:
        # Updated at each outermost call: modules may have changed, and ids may have been reused.
        _stack.of_module = {id(part): name for name, part in module.named_modules()}
    name = _stack.of_module.get(id(module), "")
    if _COMPILED in name:
        name = ".".join(part for part in name.split(".") if part != _COMPILED)
    _stack.names.append(name or type(module).__name__)


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    if _stack.names:
        _stack.names.pop()


# Call sites

_next_node_number = torch._C._autograd._get_sequence_nr


class _LastNode(threading.local):
    last = -1  # the number of the last node that was noted
    is_fork = True  # False in the main thread


class _Node(NamedTuple):
    """A node of autograd's graph, described by the operation that created it."""

    operation: str
    module: str
    compiled: bool


_NO_NODE = _Node("", "", False)


class CallSites:
    """Who issues the operations of one recording, and the autograd nodes that they create.

    Each thread numbers its own nodes, so those of DataParallel's threads are kept separately.
    """

    def __init__(self, program: "GrowingProgram") -> None:
        self._program = program
        self._of_main: dict[int, _Node] = {}  # by number
        self._of_forks: dict[int, _Node] = {}
        self._of_thread = _LastNode()
        self._of_thread.is_fork = False
        self._of_thread.last = _next_node_number() - 1  # ignore earlier nodes

    def of(
        self, name: str, gpu: VirtualGPU, note: bool = True
    ) -> "tuple[RecordedStream, HostThread]":
        """Return the stream of the next operation on ``gpu``, and the thread that issues it.

        Also sets the thread's module. ``note`` says whether to note the operation's autograd node.
        It's False for the source of a copy, for example, since the copy's backward runs on the
        target's stream.
        """
        if in_backward():
            return self._of_backward(name, gpu, note)
        host = self._program.host()
        number = set_stream_number(gpu.index) or 0
        module, compiled = current_module(), in_compiled_call()
        host.enter(module, compiled)
        if note:
            self._note(_Node(name, module, compiled), gpu.index, number)
        return self._program.stream(gpu, number), host

    def _of_backward(
        self, name: str, gpu: VirtualGPU, note: bool
    ) -> "tuple[RecordedStream, HostThread]":
        threads = self._program.threads
        threads.begin_pass_if_new()
        _, module, compiled = self._running_node()
        if torch._C._current_autograd_node() is None:  # in a callback, after the last node
            threads.join_callers_streams()
        engine = threads.engine(gpu.index)
        engine.enter(module, compiled or in_compiled_call())
        number_set = set_stream_number(gpu.index)
        number = stream_number_of_node(gpu.index) if number_set is None else number_set
        if note:  # with create_graph, or in recomputation
            node = _Node(name, current_module() or module, engine.compiled)
            self._note(node, gpu.index, number)
        stream = self._program.stream(gpu, number)
        if number_set is None:
            threads.note_stream(gpu, stream)
        return stream, engine

    def note(self, name: str, gpu: VirtualGPU) -> None:
        """Note the node of an operation without a kernel; it has a module and a stream, too."""
        node = _Node(name, current_module(), in_compiled_call())
        self._note(node, gpu.index, current_stream_number(gpu.index))

    def _note(self, node: _Node, gpu: int, stream: int) -> None:
        """Remember the most recent node, if it's new: torch creates it before it calls the kernel.

        This holds in no_grad mode, too: the node of a ``Function`` is created before its forward.
        """
        number, thread = _next_node_number() - 1, self._of_thread
        if number <= thread.last:
            return
        thread.last = number
        (self._of_forks if thread.is_fork else self._of_main)[number] = node
        if stream:
            gpus.streams_of_nodes[number] = (gpu, stream)

    def _running_node(self) -> _Node:
        """Return the running node; ``_NO_NODE`` after the last one."""
        node = torch._C._current_autograd_node()
        if node is None:
            return _NO_NODE
        noted = self._of_main.get(node._sequence_nr())
        if not self._of_forks:
            return noted or _NO_NODE
        # Another thread may have used the same number, so compare the names, too.
        name = node.name().lower()
        for candidate in (noted, self._of_forks.get(node._sequence_nr())):
            if candidate and name.startswith(candidate.operation.replace("_", "")):
                return candidate
        return _NO_NODE
