"""Which operations are sure to have ended before others begin: happens-before, by vector clocks.

The order is kept apart from the times (Lamport, 1978; Mattern, 1989): a race is a race even if the
times happen to fit.
"""

import weakref
from typing import Any, NamedTuple

import torch

from vgpu.time.steps import Release

VectorClock = dict["RecordedStream", int]
"""For each stream, how many of its operations are sure to have ended."""


def merge(clock: VectorClock, stream: "RecordedStream", position: int, other: VectorClock) -> None:
    """``stream``'s first ``position`` operations have ended, and all that ``other`` says."""
    for key, count in ((stream, position), *other.items()):
        if clock.get(key, 0) < count:
            clock[key] = count


class RecordedStream:
    """One stream in a recording, and which operations are sure to have ended before its next."""

    __slots__ = ("clock", "count", "device", "index", "number", "recording")

    def __init__(self, recording: object, index: int, device: torch.device, number: int) -> None:
        # Only compared, to tell the streams of one recording from another's.
        self.recording = recording
        self.index = index  # among the streams of the recording
        self.device = device
        self.number = number  # 0 is the device's default stream
        self.count = 0  # operations enqueued so far
        self.clock: VectorClock = {}

    def wait_for(self, operation: "Enqueued") -> None:
        """What is enqueued here from now on starts after an operation of another stream."""
        merge(self.clock, operation.stream, operation.position, operation.clock or {})


class Enqueued(NamedTuple):
    """One operation that was enqueued on a stream."""

    stream: RecordedStream
    position: int  # how many operations had been enqueued on the stream, this one included
    event: int  # the number of its end, among the events of the recording
    operation: str
    backward: bool = False
    clock: VectorClock | None = None  # what is sure to have ended before it, where that is kept
    deferred: "DeferredResult | None" = None


class DeferredResult:
    """The result of a deferred operation. It lives as long as a block of memory holds it."""

    __slots__ = ("_recorder", "event", "is_needed")

    def __init__(self, event: int, recorder: "weakref.ref[Any]") -> None:
        self.event = event
        self.is_needed = False
        self._recorder = recorder

    def __del__(self) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.steps.append(Release(self.event))


class RecordedEvent:
    """A ``torch.Event`` in a recording: its stream as it was then."""

    __slots__ = ("operation", "time_s")

    def __init__(self, operation: Enqueued) -> None:
        self.operation = operation
        self.time_s: float | None = None  # virtual; known from the end of the recording on

    @property
    def recording(self) -> object:
        """Only compared, to tell this recording's events from another's."""
        return self.operation.stream.recording
