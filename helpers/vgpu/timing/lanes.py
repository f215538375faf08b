"""What virtual time moves on: streams, threads of the host, and units that do one thing at a time.

Whether one operation must have ended before another begins is kept apart from the times, as a
vector clock (Lamport, 1978; Mattern, 1989): a race is a race even if the times happen to fit.
"""

import bisect
import threading
from typing import NamedTuple

import torch

from helpers.vgpu.device import gpus
from helpers.vgpu.timing.costs import CostModel


class Unit:
    """Something that does one thing at a time: a GPU's multiprocessors, one direction of a link.

    Streams take turns. One whose turn comes late leaves a gap, and work that is handed over later
    but can start earlier may fill it.
    """

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def place(self, ready_s: float, duration_s: float) -> float:
        """Take the first ``duration_s`` that are free from ``ready_s`` on; returns their start."""
        starts, ends = self.starts, self.ends
        if not ends or ready_s >= ends[-1]:
            if ends and ready_s == ends[-1]:
                ends[-1] = ready_s + duration_s
            else:
                starts.append(ready_s)
                ends.append(ready_s + duration_s)
            return ready_s
        index = bisect.bisect_right(ends, ready_s)
        start_s = ready_s
        while index < len(starts) and start_s + duration_s > starts[index]:
            start_s = max(start_s, ends[index])
            index += 1
        end_s = start_s + duration_s
        if index and ends[index - 1] == start_s:
            index -= 1
            ends[index] = end_s
        else:
            starts.insert(index, start_s)
            ends.insert(index, end_s)
        if index + 1 < len(starts) and starts[index + 1] == ends[index]:
            ends[index] = ends.pop(index + 1)
            starts.pop(index + 1)
        return start_s


class Done(NamedTuple):
    """One operation that was handed to a stream."""

    stream: "StreamTime"
    position: int  # how many operations the stream had been given, this one included
    end_s: float
    operation: str
    backward: bool = False
    known: "Known | None" = None  # what is sure to have ended before it, where that is kept


class Mark(NamedTuple):
    """A recorded event: its stream as it was then."""

    event: torch.Event  # held, so that no other event can have its id
    stream: "StreamTime"
    time_s: float
    position: int  # how many operations the stream had been given
    known: "Known"


Known = dict["StreamTime", int]
"""For each stream, how many of its operations are sure to have ended."""


def learn(known: Known, stream: "StreamTime", position: int, also: Known) -> None:
    """``stream``'s first ``position`` operations have ended, and all that is in ``also``."""
    for other, count in ((stream, position), *also.items()):
        if known.get(other, 0) < count:
            known[other] = count


class StreamTime:
    """One stream: when it is free, and which operations are sure to have ended before its next."""

    __slots__ = ("clock", "compute", "count", "device", "free_s", "known", "number")

    def __init__(self, clock: object, device: torch.device, number: int, compute: Unit) -> None:
        self.clock = clock  # only compared, to tell the streams of one recording from another's
        self.device = device
        self.number = number  # 0 is the device's default stream
        self.compute = compute  # shared by all streams of the device
        self.free_s = 0.0
        self.count = 0  # operations that it has been given
        self.known: Known = {}

    def wait_stream(self, other: "StreamTime") -> None:
        """What comes later here starts after all that ``other`` has been given."""
        self.free_s = max(self.free_s, other.free_s)
        learn(self.known, other, other.count, other.known)

    def wait_mark(self, mark: Mark) -> None:
        """What comes later here starts after a recorded event."""
        self.free_s = max(self.free_s, mark.time_s)
        learn(self.known, mark.stream, mark.position, mark.known)

    def wait_done(self, done: Done) -> None:
        """What comes later here starts after one operation of another stream."""
        self.free_s = max(self.free_s, done.end_s)
        learn(self.known, done.stream, done.position, done.known or {})

    def met(self, other: "StreamTime") -> None:
        """Both took part in one operation: what comes later here starts after it."""
        learn(self.known, other, other.count, other.known)


class HostTime:
    """One thread of the host: its time, and how long it takes to hand an operation over."""

    __slots__ = ("backward", "launch_s", "module", "now_s", "number")

    def __init__(self, number: int, now_s: float, launch_s: float) -> None:
        self.number = number
        self.now_s = now_s
        self.launch_s = launch_s
        # What its next operation belongs to; the recording sets it.
        self.module = ""
        self.backward = False


class _OfThread(threading.local):
    host: HostTime


class Hosts:
    """The threads of the host in one recording.

    There are the thread that records, those that DataParallel starts, and the autograd engine's,
    one for each GPU. The engine launches from C++, without the interpreter's lock.
    """

    def __init__(self, model: CostModel) -> None:
        self.main = HostTime(0, 0.0, model.launch_s(threads=1))
        self.engines: dict[int, HostTime] = {}
        self._model = model
        self._of_thread = _OfThread()
        self._of_thread.host = self.main
        self._parent = self.main  # new threads start at its time
        self._forked_launch_s = self.main.launch_s
        self._forked: list[HostTime] = []

    def current(self) -> HostTime:
        """The calling thread. One that is new here starts at its parent's time."""
        try:
            return self._of_thread.host
        except AttributeError:
            number = gpus.current_index() + 1
            host = HostTime(number, self._parent.now_s, self._forked_launch_s)
            self._of_thread.host = host
            self._forked.append(host)
            return host

    def engine(self, index: int) -> HostTime:
        """The autograd engine's thread that launches the backward pass on the GPU ``index``."""
        engine = self.engines.get(index)
        if engine is None:
            caller = getattr(self._of_thread, "host", self.main)
            engine = HostTime(caller.number, caller.now_s, self._model.engine_launch_s)
            self.engines[index] = engine
        return engine

    def join_engines(self) -> None:
        """``backward()`` has returned: its caller waited until all was handed over."""
        caller = self.current()
        caller.now_s = max(caller.now_s, *(engine.now_s for engine in self.engines.values()))
        self.engines.clear()

    def fork(self, caller: HostTime, threads: int) -> None:
        """Threads seen from now on start at the caller's time.

        They share one interpreter, and each gets an equal part of it: by arithmetic, not by turns,
        so that nothing depends on how the real threads interleave.
        """
        self._parent = HostTime(0, caller.now_s, caller.launch_s)
        self._forked_launch_s = self._model.launch_s(threads)

    def join(self, caller: HostTime) -> None:
        """The caller goes on when all threads since ``fork`` have ended."""
        caller.now_s = max([caller.now_s, *(forked.now_s for forked in self._forked)])
        self._forked.clear()
        self._parent, self._forked_launch_s = self.main, self.main.launch_s


_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether the autograd engine runs the caller."""
    return _graph_task() != -1
