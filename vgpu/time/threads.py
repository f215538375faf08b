"""The host's threads in a recording: the program's own, DataParallel's, and the autograd engine's.

The engine has one thread for each GPU, and launches from C++, without the interpreter's lock.
``backward()`` has no completion callback: whoever asks next, its caller or another pass, lets the
caller's thread and streams wait for it.
"""

import threading
from typing import TYPE_CHECKING

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU, callers_stream_number, graph_task, in_backward
from vgpu.time.happens_before import RecordedStream

if TYPE_CHECKING:
    from vgpu.time.recorder import Recorder


class HostThread:
    """One thread of the host."""

    __slots__ = ("backward", "index", "module", "number")

    def __init__(self, index: int, number: int) -> None:
        self.index = index  # among the threads of the recording
        self.number = number  # its row in a trace
        # Who issues its next operation (call_sites.py).
        self.module = ""
        self.backward = False


class _OfThread(threading.local):
    host: HostThread


class HostThreads:
    """The threads of one recording, and its backward passes."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.main = recorder.begin_thread(0, None, 1)
        self._engines: dict[int, HostThread] = {}  # those of the last backward pass
        self._of_thread = _OfThread()
        self._of_thread.host = self.main
        self._parent = self.main  # new threads start at its time
        self._sharing = 1
        self._forked: list[HostThread] = []
        self._last_pass = _BackwardPass(-1, 0)  # it runs, or has ended
        # Of the last pass: the stream that its caller had made current on the same GPU.
        self._callers_streams: dict[RecordedStream, RecordedStream] = {}

    def issuing(self) -> HostThread:
        """The calling thread; in a backward pass, the engine's that runs the node."""
        if in_backward():
            self.begin_pass_if_new()
            return self.engine(gpus.current_index())
        self.end_pass_if_returned()
        return self._current()

    def _current(self) -> HostThread:
        """The calling thread. One that is new here starts at its parent's time."""
        try:
            return self._of_thread.host
        except AttributeError:
            number = gpus.current_index() + 1
            host = self._recorder.begin_thread(number, self._parent, self._sharing)
            self._of_thread.host = host
            self._forked.append(host)
            return host

    def engine(self, index: int) -> HostThread:
        """The autograd engine's thread that launches the backward pass on the GPU ``index``."""
        engine = self._engines.get(index)
        if engine is None:
            caller = getattr(self._of_thread, "host", self.main)
            engine = self._recorder.begin_thread(caller.number, caller, 0)
            self._engines[index] = engine
        return engine

    # DataParallel

    def fork(self, caller: HostThread, threads: int) -> None:
        """Threads seen from now on start at the caller's time.

        They share one interpreter, and each gets an equal part of it: by arithmetic, not by turns,
        so that nothing depends on how the real threads interleave.
        """
        self._parent = self._recorder.begin_thread(0, caller, 1)
        self._sharing = threads

    def join(self, caller: HostThread) -> None:
        """The caller goes on when all threads since ``fork`` have ended."""
        self._recorder.join_threads(caller, self._forked)
        self._forked.clear()
        self._parent, self._sharing = self.main, 1

    # Backward passes

    def begin_pass_if_new(self) -> None:
        """The engine is about to launch something: perhaps the first operation of another pass."""
        if self._last_pass.has_ended and self._last_pass.number != graph_task():
            self._end_pass()
        if not self._engines:
            self._last_pass = _BackwardPass(graph_task(), threading.get_ident())
            torch.autograd.Variable._execution_engine.queue_callback(self._last_pass.end)

    def end_pass_if_returned(self) -> None:
        """If a pass of this thread has returned: its caller has waited for it."""
        mine = self._engines and self._last_pass.thread == threading.get_ident()
        if mine and not in_backward():
            self._end_pass()

    def _end_pass(self) -> None:
        """``backward()`` has returned: its caller waited until everything was launched."""
        self._recorder.join_threads(self._current(), self._engines.values())
        self._engines.clear()
        self.join_callers_streams()

    def note_stream(self, gpu: VirtualGPU, stream: RecordedStream) -> None:
        """The engine enqueues work on a stream of ``gpu``."""
        if stream not in self._callers_streams:
            number = callers_stream_number(gpu.index)
            self._callers_streams[stream] = self._recorder.stream(gpu, number)

    def join_callers_streams(self) -> None:
        """The streams of a pass's caller wait for those on which gradients came."""
        ended, self._callers_streams = self._callers_streams, {}
        for stream in sorted(ended, key=lambda s: (s.device.index, s.number)):
            current = ended[stream]
            if current is not stream:
                self._recorder.wait_stream(current, stream)


class _BackwardPass:
    def __init__(self, number: int, thread: int) -> None:
        """number: autograd's. thread: the one that called it."""
        self.number = number
        self.thread = thread
        self.has_ended = False

    def end(self) -> None:
        self.has_ended = True
