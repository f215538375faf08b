"""What virtual time passes on: streams, threads of the host, and units that do one thing at a time.

Whether one operation must have ended before another begins is kept apart from the times, as a
vector clock (Lamport, 1978; Mattern, 1989): a race is a race also where the times happen to fit.
"""

import bisect
from typing import NamedTuple

import torch


class Done(NamedTuple):
    """One operation that was handed to a stream: who it was and when it ends."""

    stream: "StreamTime"
    position: int  # how many operations the stream had got, this one included
    end_s: float
    operation: str


class StreamTime:
    """One stream: when it is free, and which operations are sure to have ended before its next."""

    __slots__ = ("clock", "count", "device", "free_s", "known", "number")

    def __init__(self, clock: object, device: torch.device, number: int) -> None:
        self.clock = clock  # of which recording it is; no more is asked of it here
        self.device = device
        self.number = number
        self.free_s = 0.0
        self.count = 0
        self.known: dict[StreamTime, int] = {}

    def learn(self, other: "StreamTime", count: int, known: "dict[StreamTime, int]") -> None:
        """From now on everything here comes after ``other``'s first ``count`` operations."""
        learn(self.known, other, count, known)


def learn(
    knows: dict[StreamTime, int], other: StreamTime, count: int, known: dict[StreamTime, int]
) -> None:
    """Who ``knows`` learns of ``other``'s first ``count`` operations, and of what they knew."""
    for stream, position in ((other, count), *known.items()):
        if knows.get(stream, 0) < position:
            knows[stream] = position


class Mark(NamedTuple):
    """A recorded event: its stream as it was then."""

    event: torch.Event  # keeps its id from another
    stream: StreamTime
    time_s: float
    position: int  # how many operations the stream had got
    known: dict[StreamTime, int]


class HostTime:
    """One thread of the host: its time, and how many threads share its interpreter."""

    __slots__ = ("backward", "module", "now_s", "number", "sharers")

    def __init__(self, number: int, now_s: float, sharers: int = 1) -> None:
        self.number = number
        self.now_s = now_s
        self.sharers = sharers
        # What its next operation belongs to; set by whoever knows.
        self.module = ""
        self.backward = False


class Unit:
    """Something that does one thing at a time: a GPU's multiprocessors, one way of a link.

    Streams take turns. One whose turn comes late leaves a gap, which work that is handed over
    later, but can start earlier, may fill.
    """

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def place(self, ready_s: float, duration_s: float) -> float:
        """The first time from ``ready_s`` at which ``duration_s`` fits; it is then taken."""
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
