"""Who hands work over, and what is known of the order in which it runs.

Whether one operation must have ended before another begins is kept apart from the times, as a
vector clock (Lamport, 1978; Mattern, 1989): a race is a race even if the times happen to fit.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vgpu.memory import gpus
from vgpu.time.queues import Lane, ThreadTime
from vgpu.time.steps import Join, Step, Thread


class Done(NamedTuple):
    """One operation that was handed to a stream."""

    stream: "StreamTime"
    position: int  # how many operations the stream had been given, this one included
    moment: int  # the number of its end, among the steps of the recording
    end_s: float
    operation: str
    backward: bool = False
    known: "Known | None" = None  # what is sure to have ended before it, where that is kept
    # where no kernel has been handed over yet: what it would do (compiled/fusion.py)
    put_off: Any = None

    @property
    def launched(self) -> "Done":
        """The kernel that made it, where it was put off and there is one by now."""
        made: Done | None = None if self.put_off is None else self.put_off.made
        return made or self


class Marked(NamedTuple):
    """A recorded event: its stream as it was then."""

    event: torch.Event  # held, so that no other event can have its id
    done: Done


Known = dict["StreamTime", int]
"""For each stream, how many of its operations are sure to have ended."""


def learn(known: Known, stream: "StreamTime", position: int, also: Known) -> None:
    """``stream``'s first ``position`` operations have ended, and all that is in ``also``."""
    for other, count in ((stream, position), *also.items()):
        if known.get(other, 0) < count:
            known[other] = count


class StreamTime:
    """One stream, and which operations are sure to have ended before its next."""

    __slots__ = ("_lane", "count", "index", "known", "recording")

    def __init__(self, recording: object, index: int, lane: Lane) -> None:
        # Only compared, to tell the streams of one recording from another's.
        self.recording = recording
        self.index = index  # among the streams of the recording
        self._lane = lane
        self.count = 0  # operations that it has been given
        self.known: Known = {}

    @property
    def device(self) -> torch.device:
        return self._lane.device

    @property
    def number(self) -> int:
        """0 is the device's default stream."""
        return self._lane.number

    @property
    def free_s(self) -> float:
        return self._lane.free_s

    def learn(self, done: Done) -> None:
        """What comes later here starts after an operation of another stream."""
        learn(self.known, done.stream, done.position, done.known or {})


class HostTime:
    """One thread of the host."""

    __slots__ = ("_time", "backward", "index", "module")

    def __init__(self, index: int, time: ThreadTime) -> None:
        self.index = index  # among the threads of the recording
        self._time = time
        # What its next operation belongs to; the recording sets it.
        self.module = ""
        self.backward = False

    @property
    def number(self) -> int:
        return self._time.number

    @property
    def now_s(self) -> float:
        return self._time.now_s

    @property
    def launch_s(self) -> float:
        return self._time.launch_s


class _OfThread(threading.local):
    host: HostTime


class Hosts:
    """The threads of the host in one recording.

    There are the thread that records, those that DataParallel starts, and the autograd engine's,
    one for each GPU. The engine launches from C++, without the interpreter's lock.
    """

    def __init__(self, begin: Callable[[Thread], HostTime], do: Callable[[Step], object]) -> None:
        """begin: what makes a thread of the step that begins it."""
        self._begin, self._do = begin, do
        self.main = begin(Thread(0, None, 1))
        self.engines: dict[int, HostTime] = {}
        self._of_thread = _OfThread()
        self._of_thread.host = self.main
        self._parent = self.main  # new threads start at its time
        self._sharing = 1
        self._forked: list[HostTime] = []

    def current(self) -> HostTime:
        """The calling thread. One that is new here starts at its parent's time."""
        try:
            return self._of_thread.host
        except AttributeError:
            number = gpus.current_index() + 1
            host = self._begin(Thread(number, self._parent.index, self._sharing))
            self._of_thread.host = host
            self._forked.append(host)
            return host

    def engine(self, index: int) -> HostTime:
        """The autograd engine's thread that launches the backward pass on the GPU ``index``."""
        engine = self.engines.get(index)
        if engine is None:
            caller = getattr(self._of_thread, "host", self.main)
            engine = self.engines[index] = self._begin(Thread(caller.number, caller.index, 0))
        return engine

    def join_engines(self) -> None:
        """``backward()`` has returned: its caller waited until all was handed over."""
        engines = tuple(engine.index for engine in self.engines.values())
        self._do(Join(self.current().index, engines))
        self.engines.clear()

    def fork(self, caller: HostTime, threads: int) -> None:
        """Threads seen from now on start at the caller's time.

        They share one interpreter, and each gets an equal part of it: by arithmetic, not by turns,
        so that nothing depends on how the real threads interleave.
        """
        self._parent = self._begin(Thread(0, caller.index, 1))
        self._sharing = threads

    def join(self, caller: HostTime) -> None:
        """The caller goes on when all threads since ``fork`` have ended."""
        self._do(Join(caller.index, tuple(forked.index for forked in self._forked)))
        self._forked.clear()
        self._parent, self._sharing = self.main, 1
