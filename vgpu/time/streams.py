"""Streams and events of virtual GPUs.

An operation has ended when its call returns, so waiting never takes real time here. Only the books
are kept: which stream is current on which device in which thread, and when an event was recorded,
by the host's clock or, in a recording, in virtual time.
"""

import itertools
import time
import weakref
from typing import Any

import torch

from vgpu.memory import blocks as memory
from vgpu.memory import gpus
from vgpu.time import recording
from vgpu.time.backward import graph_task
from vgpu.time.lanes import StreamTime
from vgpu.time.recording import Recording

_PlainStream, _PlainEvent = torch.Stream, torch.Event
_stream_ids = itertools.count(1)
_priorities: dict[int, int] = {}  # of streams by their id, where it is not 0
_HIGHEST_PRIORITY = -3  # as many as c10/cuda/CUDAStream.h has: max_compile_time_stream_priorities


def _streams() -> "dict[int, Stream]":
    """The streams that this thread has set, by their GPUs' indices; in a backward pass, that pass.

    The engine makes a node's stream current; what a hook sets inside comes on top.
    """
    current = gpus.in_use.current
    backward = graph_task()
    under_way = current.of_backward
    if backward == -1:
        under_way.clear()
        return current.streams
    while under_way and under_way[-1][0] > backward:  # of a pass within this one, which has ended
        under_way.pop()
    if not under_way or under_way[-1][0] != backward:
        under_way.append((backward, {}))
    return under_way[-1][1]


class Stream(torch.Stream):
    """A queue of work on one virtual GPU; ``with stream:`` makes it and its device current."""

    _entered: list[tuple["Stream | None", int]]

    def __new__(
        cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> "Stream":
        index = _index(device)
        stream = super().__new__(
            cls,
            stream_id=next(_stream_ids) if stream_id is None else stream_id,
            device_index=index,
            device_type=torch._C._autograd.DeviceType.PrivateUse1.value,
        )
        stream._entered = []
        if stream_id is None and priority < 0:
            _priorities[stream.stream_id] = max(priority, _HIGHEST_PRIORITY)
        return stream

    @property
    def priority(self) -> int:
        """0, or less for a stream whose kernels pass those of others, as in CUDA."""
        return priority_of(self.stream_id)

    def query(self) -> bool:
        """Whether all work given to this stream has ended."""
        now = recording.under_way
        return now is None or now.has_ended(_time_of(self, now))

    def synchronize(self) -> None:
        """Wait until all work given to this stream has ended."""
        now = recording.under_way
        if now is not None:
            now.synchronize([_time_of(self, now)])

    def wait_event(self, event: torch.Event) -> None:
        """Work given later starts after ``event`` has happened."""
        now = recording.under_way
        if now is not None:
            _wait_event(_time_of(self, now), event, now)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Work given later starts after all work that ``stream`` has got so far."""
        now = recording.under_way
        if now is not None:
            now.clock.settle_and_wait(_time_of(self, now), _time_of(stream, now))

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        self._entered.append((_streams().get(self.device_index), gpus.current_index()))
        set_stream(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        stream, index = self._entered.pop()
        if stream is None:
            _streams().pop(self.device_index, None)
        else:
            set_stream(stream)
        gpus.exchange_index(index)

    def __repr__(self) -> str:
        return f"<torch.vgpu.Stream device={self.device} stream_id={self.stream_id}>"


class Event(torch.Event):
    """A mark in a stream; with ``enable_timing`` it keeps the host's time of recording."""

    _enable_timing: bool
    _time_s: float | None
    _recording: "weakref.ref[Recording] | None"  # whose virtual time it is; None: the host's

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> "Event":
        event = super().__new__(cls, gpus.DEVICE_TYPE, enable_timing=enable_timing)
        event._enable_timing = enable_timing
        event._time_s = event._recording = None
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark what ``stream``, or the current one, has got so far."""
        now = recording.under_way
        self._recording = None if now is None else weakref.ref(now)
        if now is None:
            self._time_s = time.perf_counter()
        else:
            marked = _time_of(current_stream() if stream is None else stream, now)
            now.settle(marked)
            self._time_s = now.clock.record_event(self, marked)

    def query(self) -> bool:
        """Whether the event has happened; one that was never recorded has."""
        now = recording.under_way
        return now is None or self._time_s is None or now.clock.ask_event(self)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Work given later to ``stream``, or to the current one, starts after the event."""
        now = recording.under_way
        if now is not None:
            _wait_event(_time_of(current_stream() if stream is None else stream, now), self, now)

    def synchronize(self) -> None:
        """Wait until the event has happened."""
        if recording.under_way is not None:
            recording.under_way.clock.host_waits_for_event(self)

    def elapsed_time(self, end_event: "Event") -> float:  # type: ignore[override]
        """Milliseconds between two events that have happened, by the clock that was used."""
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time_s is None or end_event._time_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self._recording != end_event._recording:
            raise RuntimeError(
                "one event was recorded by virtual time and the other by the host's clock, or in "
                "another recording: record both in one vgpu.record() block, or both outside of one"
            )
        return (end_event._time_s - self._time_s) * 1000

    def __repr__(self) -> str:
        return f"<torch.vgpu.Event recorded={self._time_s is not None}>"


def _index(device: Any) -> int:
    return gpus.current_index() if device is None else gpus.meant_by(device).index


def default_stream(device: Any = None) -> Stream:
    """The stream that a device uses unless told otherwise."""
    return Stream(_index(device), stream_id=0)


def priority_of(number: int) -> int:
    """The priority of the stream with this id; below 0 its kernels pass those of others."""
    return _priorities.get(number, 0)


def set_stream_number(index: int) -> int | None:
    """The id of the stream that this thread has made current on a GPU; None if it has not."""
    stream = _streams().get(index)
    return None if stream is None else stream.stream_id


def current_number(index: int) -> int:
    """The id of the stream that is current on a GPU in this thread; 0 is the default one.

    In a backward pass it is the node's in a recording only, unless a hook has set one.
    """
    number = set_stream_number(index)
    if number is None:
        now = recording.under_way
        number = 0 if now is None else now.places.current_stream(index)
    return number


def _time_of(stream: torch.Stream, now: Recording) -> StreamTime:
    return now.clock.stream(gpus.by_index(stream.device_index), stream.stream_id)


def _wait_event(waiting: StreamTime, event: torch.Event, now: Recording) -> None:
    now.settle(waiting)  # what it got before the wait does not wait
    now.clock.wait_event(waiting, event)


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return _streams().get(index) or Stream(index, stream_id=current_number(index))


def set_stream(stream: Stream) -> None:
    """Make a stream and its device current in this thread."""
    if stream.stream_id:  # until then every block lies on the default stream
        memory.streams_from(current_number)
    gpus.exchange_index(stream.device_index)
    _streams()[stream.device_index] = stream


def make_stream(*args: Any, **kwargs: Any) -> torch.Stream:
    """What ``torch.Stream(device, priority)`` makes while virtual GPUs are enabled."""
    device = args[0] if args else kwargs.get("device")
    if "stream_id" in kwargs or not _is_virtual(device):
        return _PlainStream(*args, **kwargs)
    return Stream(device, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})


def make_event(device: Any = None, **options: Any) -> torch.Event:
    """What ``torch.Event(device, enable_timing=...)`` makes while virtual GPUs are enabled."""
    return Event(**options) if _is_virtual(device) else _PlainEvent(device, **options)


def _is_virtual(device: Any) -> bool:
    """No device, or a number, means the accelerator: a virtual GPU."""
    if device is None or isinstance(device, int):
        return True
    return gpus.resolve(torch.device(device)) is not None
