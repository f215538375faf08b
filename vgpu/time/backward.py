"""Backward passes as a recording sees them: when one begins, and what waits when one has returned."""

import threading
from collections.abc import Callable

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.time.lanes import Hosts, StreamTime

graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether the autograd engine runs the caller."""
    return graph_task() != -1


def callers_number(index: int) -> int:
    """The number of the stream that was current on a GPU when the backward pass was called."""
    stream = gpus.in_use.current.streams.get(index)
    return 0 if stream is None else stream.stream_id


class Pass:
    """One backward pass."""

    def __init__(self, number: int, thread: int) -> None:
        """number: autograd's. thread: that which has called it."""
        self.number = number
        self.thread = thread
        self.has_ended = False

    def end(self) -> None:
        self.has_ended = True


class BackwardPasses:
    """The backward passes of one recording.

    Nobody is told that one has returned. So whoever asks next, its caller or another pass, lets the
    caller's thread and streams wait for it.
    """

    def __init__(
        self,
        hosts: Hosts,
        stream: Callable[[VirtualGPU, int], StreamTime],
        wait: Callable[[StreamTime, StreamTime], None],
    ) -> None:
        """stream: finds that of a GPU and a number. wait: lets a stream wait for another."""
        self._hosts, self._stream, self._wait = hosts, stream, wait
        self._last = Pass(-1, 0)  # it runs, or has ended
        # Of the last one: the stream that its caller had made current on the same GPU.
        self._callers_streams: dict[StreamTime, StreamTime] = {}

    def begin_if_new(self) -> None:
        """The engine is about to hand something over: perhaps the first of another pass."""
        if self._last.has_ended and self._last.number != graph_task():
            self._return()
        if not self._hosts.engines:
            self._last = Pass(graph_task(), threading.get_ident())
            torch.autograd.Variable._execution_engine.queue_callback(self._last.end)

    def give(self, gpu: VirtualGPU, stream: StreamTime) -> None:
        """The engine gives work to a stream of ``gpu``."""
        if stream not in self._callers_streams:
            self._callers_streams[stream] = self._stream(gpu, callers_number(gpu.index))

    def end_if_returned(self) -> None:
        """If one of this thread has returned: its caller has waited for it."""
        mine = self._hosts.engines and self._last.thread == threading.get_ident()
        if mine and not in_backward():
            self._return()

    def _return(self) -> None:
        self._hosts.join_engines()
        self.join_callers_streams()

    def join_callers_streams(self) -> None:
        """The streams of a pass's caller wait for those on which gradients came."""
        ended, self._callers_streams = self._callers_streams, {}
        for stream in sorted(ended, key=lambda s: (s.device.index, s.number)):
            current = ended[stream]
            if current is not stream:
                self._wait(current, stream)
