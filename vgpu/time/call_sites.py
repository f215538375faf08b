"""Where an operation goes: the stream that gets it, and the thread and the module that ask for it."""

from collections.abc import Callable

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.time import module_names
from vgpu.time.backward import callers_number, in_backward
from vgpu.time.clock import Clock
from vgpu.time.lanes import HostTime, StreamTime
from vgpu.time.module_names import Nodes


class Places:
    """Where the operations of one recording go."""

    def __init__(self, clock: Clock, set_stream: Callable[[int], int | None]) -> None:
        """set_stream: for the index of a GPU, the number of the stream that the thread has set."""
        self._clock = clock
        self._set_stream = set_stream
        self._nodes = Nodes()

    def of(self, name: str, gpu: VirtualGPU, note: bool = True) -> tuple[StreamTime, HostTime]:
        """The stream that gets the next operation on ``gpu``, and the thread that hands it over.

        Tells the thread which module it works for. note: False for the source of a copy, whose
        backward runs on the target's stream.
        """
        if in_backward():
            return self._of_backward(name, gpu, note)
        host = self._clock.host()
        number = self._set_stream(gpu.index) or 0
        host.module, host.backward = module_names.current(), False
        if note:
            self._nodes.note(name, host.module, gpu.index, number)
        return self._clock.stream(gpu, number), host

    def _of_backward(self, name: str, gpu: VirtualGPU, note: bool) -> tuple[StreamTime, HostTime]:
        clock = self._clock
        clock.passes.begin_if_new()
        module, number = self._of_node(gpu.index)
        engine = clock.hosts.engine(gpu.index)
        engine.module, engine.backward = module, True
        number_set = self._set_stream(gpu.index)
        number = number if number_set is None else number_set
        if note:  # with create_graph, or in a checkpoint that computes its part again
            self._nodes.note(name, module_names.current() or module, gpu.index, number)
        stream = clock.stream(gpu, number)
        if number_set is None:
            clock.passes.give(gpu, stream)
        return stream, engine

    def note(self, name: str, gpu: VirtualGPU) -> None:
        """The same for an operation that launches nothing, whose node has a stream as well."""
        number = self.current_stream(gpu.index)
        self._nodes.note(name, module_names.current(), gpu.index, number)

    def current_stream(self, index: int) -> int:
        """The number of the stream that is current on a GPU in this thread; 0 is the default one.

        In a backward pass that is the node's, unless a hook has set another.
        """
        number = self._set_stream(index)
        if number is None:
            number = self._of_node(index)[1] if in_backward() else 0
        return number

    def _of_node(self, index: int) -> tuple[str, int]:
        """The module of the node that runs, and the number of its stream on a GPU.

        Behind the last node, in the engine's callbacks, it is that of the pass's caller.
        """
        if torch._C._current_autograd_node() is not None:
            return self._nodes.running(index)
        self._clock.passes.join_callers_streams()
        return "", callers_number(index)
