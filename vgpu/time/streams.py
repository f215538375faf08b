"""``torch.vgpu.Stream`` and ``torch.vgpu.Event``.

An operation has finished when its call returns, so waiting takes no real time. These classes only
track each thread's current streams, and when an event was recorded: by the host's clock or, in a
recording, in virtual time.
"""

import itertools
import time
from typing import Any

import torch

from vgpu.memory import blocks as memory
from vgpu.memory import gpus
from vgpu.memory.gpus import current_stream_number, set_streams
from vgpu.time import recording
from vgpu.time.program import GrowingProgram, RecordedEvent, RecordedStream

_PlainStream, _PlainEvent = torch.Stream, torch.Event
_stream_ids = itertools.count(1)
_HIGHEST_PRIORITY = -3  # c10/cuda/CUDAStream.h: max_compile_time_stream_priorities


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
            gpus.stream_priorities[stream.stream_id] = max(priority, _HIGHEST_PRIORITY)
        return stream

    @property
    def priority(self) -> int:
        """The priority: 0, or negative if kernels overtake those on other streams, as in CUDA."""
        return gpus.stream_priorities.get(self.stream_id, 0)

    def query(self) -> bool:
        """Whether all work submitted to this stream has finished."""
        program = _program()
        return program is None or program.query_stream(_recorded(self, program))

    def synchronize(self) -> None:
        """Wait until all work submitted to this stream has finished."""
        program = _program()
        if program is not None:
            program.synchronize([_recorded(self, program)])

    def wait_event(self, event: torch.Event) -> None:
        """Make future work submitted to this stream wait for ``event``."""
        program = _program()
        if program is not None:
            program.wait_event(_recorded(self, program), getattr(event, "_recorded", None))

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make future work submitted to this stream wait for all current work of ``stream``."""
        program = _program()
        if program is not None:
            program.wait_stream(_recorded(self, program), _recorded(stream, program))

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        self._entered.append((set_streams().get(self.device_index), gpus.current_index()))
        set_stream(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        stream, index = self._entered.pop()
        if stream is None:
            set_streams().pop(self.device_index, None)
        else:
            set_stream(stream)
        gpus.exchange_index(index)

    def __repr__(self) -> str:
        return f"<torch.vgpu.Stream device={self.device} stream_id={self.stream_id}>"


class Event(torch.Event):
    """An event of a stream; with ``enable_timing``, its time can be queried."""

    _enable_timing: bool
    _host_time_s: float | None  # if it was recorded outside a recording
    _recorded: RecordedEvent | None  # if it was recorded in one

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> "Event":
        event = super().__new__(cls, gpus.DEVICE_TYPE, enable_timing=enable_timing)
        event._enable_timing = enable_timing
        event._host_time_s = event._recorded = None
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record the event on ``stream``, or on the current stream."""
        program = _program()
        self._host_time_s = self._recorded = None
        if program is None:
            self._host_time_s = time.perf_counter()
        else:
            of = _recorded(current_stream() if stream is None else stream, program)
            self._recorded = program.record_event(of, self._enable_timing)

    def query(self) -> bool:
        """Whether the event has happened; True if it was never recorded."""
        program = _program()
        return program is None or program.query_event(self._recorded)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make future work on ``stream``, by default the current one, wait for the event."""
        program = _program()
        if program is not None:
            waiting = _recorded(current_stream() if stream is None else stream, program)
            program.wait_event(waiting, self._recorded)

    def synchronize(self) -> None:
        """Wait until the event has happened."""
        program = _program()
        if program is not None:
            program.host_waits_for_event(self._recorded)

    def elapsed_time(self, end_event: "Event") -> float:  # type: ignore[override]
        """Return the milliseconds between two events, in virtual time if recorded in it."""
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._is_recorded and end_event._is_recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self._recording is not end_event._recording:
            raise RuntimeError(
                "one event was recorded in virtual time and the other by the host's clock, or in "
                "another recording: record both in one vgpu.record() block, or both outside of one"
            )
        return (end_event._time_s() - self._time_s()) * 1000

    @property
    def _is_recorded(self) -> bool:
        return self._host_time_s is not None or self._recorded is not None

    @property
    def _recording(self) -> object:
        """The recording in whose virtual time the event was recorded; None for the host's clock."""
        return None if self._recorded is None else self._recorded.recording

    def _time_s(self) -> float:
        if self._recorded is None:
            assert self._host_time_s is not None
            return self._host_time_s
        if self._recorded.time_s is None:  # the recording is still active
            program = _program()
            assert program is not None
            return program.time_s(self._recorded.operation.event)
        return self._recorded.time_s

    def __repr__(self) -> str:
        return f"<torch.vgpu.Event recorded={self._is_recorded}>"


def _index(device: Any) -> int:
    return gpus.current_index() if device is None else gpus.meant_by(device).index


def default_stream(device: Any = None) -> Stream:
    """Return the default stream of a device."""
    return Stream(_index(device), stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device in this thread."""
    index = _index(device)
    return set_streams().get(index) or Stream(index, stream_id=current_stream_number(index))


def set_stream(stream: Stream) -> None:
    """Make a stream and its device current in this thread."""
    if stream.stream_id:
        memory.several_streams = True
    gpus.exchange_index(stream.device_index)
    set_streams()[stream.device_index] = stream


def _program() -> GrowingProgram | None:
    """Return the program of the active recording, if any."""
    return None if recording.under_way is None else recording.under_way.program


def _recorded(stream: torch.Stream, program: GrowingProgram) -> RecordedStream:
    return program.stream(gpus.by_index(stream.device_index), stream.stream_id)


def make_stream(*args: Any, **kwargs: Any) -> torch.Stream:
    """Create what ``torch.Stream(device, priority)`` returns while virtual GPUs are enabled."""
    device = args[0] if args else kwargs.get("device")
    if "stream_id" in kwargs or not _is_virtual(device):
        return _PlainStream(*args, **kwargs)
    return Stream(device, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})


def make_event(device: Any = None, **options: Any) -> torch.Event:
    """Create what ``torch.Event(device, ...)`` returns while virtual GPUs are enabled."""
    return Event(**options) if _is_virtual(device) else _PlainEvent(device, **options)


def _is_virtual(device: Any) -> bool:
    """Whether a device is a virtual GPU; None or an index means the accelerator, which is one."""
    if device is None or isinstance(device, int):
        return True
    return gpus.resolve(torch.device(device)) is not None
