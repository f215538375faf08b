"""The program that is being recorded: its steps so far, and which operations happen before others.

Steps have no times. A simulator (simulate.py) computes times on demand: at the end of the
recording, when the program itself asks (``event.query()``), or for a value that may not have been
written yet (races.py). Nothing here depends on real time or on how threads interleave.

Happens-before is tracked by vector clocks (Lamport, 1978; Mattern, 1989), independent of the times:
a race is a race even if the times happen to work out.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.time.compiler_passes import Fusion
from vgpu.time.costs import CostModel, check_seconds
from vgpu.time.host_threads import HostThread, HostThreads
from vgpu.time.simulate import Simulator
from vgpu.time.steps import (
    BeginRange,
    BeginStream,
    BeginThread,
    Copy,
    Deferred,
    EndRange,
    EventStep,
    GraphBreak,
    GroupCollective,
    HostWait,
    HostWork,
    JoinThreads,
    Kernel,
    LocalCollective,
    Program,
    ProgramStep,
    QueryEvent,
    RecordEvent,
    Release,
    WaitEvent,
)

VectorClock = dict["RecordedStream", int]
"""For each stream, how many of its operations happen before a certain point."""


class RecordedStream:
    """One recorded stream, with the vector clock of what happens before its next operation."""

    __slots__ = ("clock", "count", "device", "index", "number", "recording")

    def __init__(self, recording: object, index: int, device: torch.device, number: int) -> None:
        self.recording = recording  # only to tell its streams from another recording's
        self.index = index  # among the streams of the recording
        self.device = device
        self.number = number  # 0 is the device's default stream
        self.count = 0  # operations enqueued so far
        self.clock: VectorClock = {}


class Enqueued(NamedTuple):
    """One operation that was enqueued on a stream."""

    stream: RecordedStream
    position: int  # how many operations were enqueued on the stream, including this one
    event: int  # the number of the event at its end
    operation: str
    backward: bool = False
    clock: VectorClock | None = None  # what happens before it, if known
    deferred: "DeferredResult | None" = None


class DeferredResult:
    """The result of a deferred operation; alive as long as a block of memory holds it."""

    __slots__ = ("_program", "event", "is_needed")

    def __init__(self, event: int, program: "GrowingProgram") -> None:
        self.event = event
        self.is_needed = False
        self._program = weakref.ref(program)

    def __del__(self) -> None:
        program = self._program()
        if program is not None:
            program.steps.append(Release(self.event))


class RecordedEvent:
    """A ``torch.Event`` in a recording: the state of its stream when it was recorded."""

    __slots__ = ("operation", "time_s")

    def __init__(self, operation: Enqueued) -> None:
        self.operation = operation
        self.time_s: float | None = None  # in virtual time, known once the recording has ended

    @property
    def recording(self) -> object:
        """The recording, used only to tell its events from another recording's."""
        return self.operation.stream.recording


class GrowingProgram:
    """The steps of one recording so far. All times are seconds since it began."""

    def __init__(self, costs: CostModel, rank: int = 0) -> None:
        self.costs = costs
        self.rank = rank
        self.recording = object()
        self.steps: list[ProgramStep] = []
        self.several_streams = False  # whether a GPU has used more than its default stream
        self._lock = threading.RLock()  # for event numbers; DataParallel has multiple threads
        self._events = 0
        self._threads = 0
        self._streams: dict[tuple[int, int], RecordedStream] = {}
        self._host_clock: VectorClock = {}
        self._timed: list[RecordedEvent] = []
        self._gpu, self._gpus = gpus.current_index(), gpus.device_count()
        self._simulator = Simulator(costs, rank)
        self._simulated = 0
        # If elementwise operations are fused: the pass, the number of steps passed to it, and its
        # result. Without ``costs.fuses``, the first operation of compiled code creates the pass;
        # earlier steps stay unchanged.
        self._fusion = Fusion() if costs.fuses else None
        self._fused_from = 0
        self._fused: list[ProgramStep] = []
        self.threads = HostThreads(self)

    def end(self) -> Program:
        """Finish the program at the end of the recording, and return it."""
        self.host()  # the main thread waits for its last backward pass
        self.break_graph(None)
        for event in self._timed:
            event.time_s = self.time_s(event.operation.event)
        with self._lock:
            steps = self._steps_after_fusion()
        kept = self._fusion.kept if self._fusion else frozenset[int]()
        return Program(self.costs, self.rank, self._gpu, self._gpus, steps, kept=kept)

    # Times, on demand

    def time_s(self, event: int) -> float:
        """Return the time of an event."""
        simulator = self.simulated()
        return simulator.time_s(self._fusion.number_of[event] if self._fusion else event)

    def ready_s(self, stream: RecordedStream, host: HostThread) -> float:
        """Return the earliest time at which the next operation could start on the stream."""
        simulator = self.simulated()
        thread = simulator.threads[host.index]
        return max(thread.now_s + thread.launch_s, simulator.streams[stream.index].free_s)

    def simulated(self) -> Simulator:
        """Return a simulator that has simulated all steps so far."""
        with self._lock:
            steps = self._steps_after_fusion()
            self._simulator.run(steps[self._simulated :])
            self._simulated = len(steps)
        return self._simulator

    def _steps_after_fusion(self) -> list[ProgramStep]:
        if self._fusion is None:
            return self.steps
        new = self.steps[self._fused_from :]
        self._fused_from += len(new)
        self._fused += self._fusion.steps(new)
        return self._fused

    # Threads

    def host(self) -> HostThread:
        """Return the calling thread; in a backward pass, the engine's thread that runs the node."""
        return self.threads.issuing()

    def begin_thread(self, number: int, parent: HostThread | None, sharing: int) -> HostThread:
        """Start a thread of the host; see ``BeginThread``."""
        with self._lock:
            self.steps.append(BeginThread(number, parent.index if parent else None, sharing))
            self._threads += 1
            return HostThread(self._threads - 1, number, backward=not sharing)

    def join_threads(self, host: HostThread, others: Iterable[HostThread]) -> None:
        """Make a thread wait for the others."""
        self.steps.append(JoinThreads(host.index, tuple(other.index for other in others)))

    def spend(self, duration_s: float, name: str) -> None:
        """Keep the calling thread busy for ``duration_s``."""
        check_seconds("duration_s", duration_s)
        self.steps.append(HostWork(self.host().index, duration_s, name))

    def begin_range(self, name: str) -> int:
        """Record that the calling thread enters a named block; return the thread's index."""
        host = self.host()
        self.steps.append(BeginRange(host.index, name))
        return host.index

    def end_range(self, thread: int) -> None:
        """Record that a thread leaves the innermost block that it has entered."""
        self.host()  # waits for a backward pass that has returned
        self.steps.append(EndRange(thread))

    def host_waits(self, streams: Iterable[RecordedStream], name: str, host: HostThread) -> None:
        """Make a thread wait for everything enqueued on the streams."""
        for stream in streams:
            event = self._begin_event(RecordEvent(stream.index))
            self.steps.append(HostWait(host.index, event, name))
            _merge(self._host_clock, stream, stream.count, stream.clock)

    def synchronize(self, streams: Sequence[RecordedStream]) -> None:
        """Make the calling thread wait for everything enqueued on the streams."""
        for stream in streams:
            self.break_graph(stream)
        self.host_waits(streams, "synchronize", self.host())

    # Operations

    def enqueue(self, step: Kernel | GroupCollective, stream: RecordedStream) -> Enqueued:
        """Launch an operation on a stream."""
        event = self._begin_event(step)
        stream.count += 1
        return Enqueued(stream, stream.count, event, step.name, step.by.backward)

    def enqueue_together(
        self, step: Copy | LocalCollective, streams: Sequence[RecordedStream]
    ) -> list[Enqueued]:
        """Launch an operation that occupies all ``streams``: later work on each starts after it."""
        event = self._begin_event(step)
        for stream in streams:
            stream.count += 1
        for stream in streams:
            for other in streams:
                if other is not stream:
                    _merge(stream.clock, other, other.count, other.clock)
        name, backward = step.name, step.by.backward
        return [Enqueued(stream, stream.count, event, name, backward) for stream in streams]

    @property
    def has_deferred(self) -> bool:
        """Whether any operation so far may have been deferred."""
        return self._fusion is not None

    def defer(self, step: Deferred, stream: RecordedStream) -> Enqueued:
        """Append an operation that will be launched in one kernel with its neighbors, or never."""
        with self._lock:
            self._fusion = self._fusion or Fusion()
        event = self._begin_event(step)
        stream.count += 1
        result = DeferredResult(event, self)
        return Enqueued(stream, stream.count, event, step.name, step.by.backward, None, result)

    def allocation(self, name: str, stream: RecordedStream, backward: bool) -> Enqueued:
        """Note an allocation on the stream, whose earlier operations may still use that memory."""
        event = self._begin_event(RecordEvent(stream.index))
        return Enqueued(stream, stream.count, event, name, backward)

    def break_graph(self, stream: RecordedStream | None) -> None:
        """End compiled code: launch what's deferred on ``stream``, or on all streams if None."""
        if self._fusion is not None:
            self.steps.append(GraphBreak(stream.index if stream else None, self.host().by))

    def _begin_event(self, step: EventStep) -> int:
        with self._lock:
            self.steps.append(step)
            self._events += 1
            return self._events - 1

    # Streams and events

    def stream(self, gpu: VirtualGPU, number: int) -> RecordedStream:
        """Return a stream of ``gpu``; number 0 is the default stream."""
        self.threads.end_pass_if_returned()
        key = (gpu.index, number)
        stream = self._streams.get(key)
        if stream is None:
            with self._lock:
                priority = gpus.stream_priorities.get(number, 0)
                self.steps.append(BeginStream(gpu.index, number, priority))
                stream = RecordedStream(self.recording, len(self._streams), gpu.device, number)
                self._streams[key] = stream
            self.several_streams = self.several_streams or number != 0
        return stream

    def streams_of(self, gpu: VirtualGPU) -> list[RecordedStream]:
        """Return the streams of a GPU that were used in this recording."""
        return [stream for stream in self._streams.values() if stream.device == gpu.device]

    def wait_stream(self, stream: RecordedStream, other: RecordedStream) -> None:
        """Record the program's ``stream.wait_stream(other)``: it ends compiled code on both."""
        self.break_graph(stream)
        self.break_graph(other)
        self.wait_enqueued(stream, other)

    def wait_enqueued(self, stream: RecordedStream, other: RecordedStream) -> None:
        """Do what ``wait_stream`` does, but for a collective, so without ending compiled code."""
        event = self._begin_event(RecordEvent(other.index))
        self.steps.append(WaitEvent(stream.index, event))
        _merge(stream.clock, other, other.count, other.clock)

    def wait_operation(self, stream: RecordedStream, done: Enqueued) -> None:
        """Make later work on ``stream`` start after one operation on another stream."""
        self.steps.append(WaitEvent(stream.index, done.event))
        _merge(stream.clock, done.stream, done.position, done.clock or {})

    def record_event(self, stream: RecordedStream, is_timed: bool) -> RecordedEvent:
        """Record an event on a stream; ``is_timed`` says whether the program can query its time."""
        self.break_graph(stream)
        event = self._begin_event(RecordEvent(stream.index, self.host().index))
        clock = dict(stream.clock)
        recorded = RecordedEvent(Enqueued(stream, stream.count, event, "event", False, clock))
        if is_timed:
            self._timed.append(recorded)
        return recorded

    def wait_event(self, stream: RecordedStream, event: RecordedEvent | None) -> None:
        """Make later work on the stream start after the event, if it belongs to this recording."""
        self.break_graph(stream)  # what's already enqueued doesn't wait
        if event is not None and event.recording is self.recording:
            self.wait_operation(stream, event.operation)

    def host_waits_for_event(self, event: RecordedEvent | None) -> None:
        """Make the calling thread wait for the event, if it belongs to this recording."""
        if event is not None and event.recording is self.recording:
            done = event.operation
            self.steps.append(HostWait(self.host().index, done.event, "synchronize"))
            _merge(self._host_clock, done.stream, done.position, done.clock or {})

    def query_stream(self, stream: RecordedStream) -> bool:
        """Whether everything enqueued on the stream has finished.

        If so, that work happens before the host's later work.
        """
        self.break_graph(stream)
        event = self._begin_event(RecordEvent(stream.index))
        return self._query(Enqueued(stream, stream.count, event, "query", False, stream.clock))

    def query_event(self, event: RecordedEvent | None) -> bool:
        """Whether the event has happened; always True if it isn't part of this recording."""
        if event is None or event.recording is not self.recording:
            return True
        return self._query(event.operation)

    def _query(self, operation: Enqueued) -> bool:
        host = self.host()
        end_s = self.time_s(operation.event)
        has_ended = self._simulator.threads[host.index].now_s >= end_s
        self.steps.append(QueryEvent(host.index, operation.event))
        if has_ended:
            clock = operation.clock or {}
            _merge(self._host_clock, operation.stream, operation.position, clock)
        return has_ended

    def happens_before(self, operation: Enqueued, stream: RecordedStream) -> bool:
        """Whether ``operation`` is guaranteed to finish before ``stream`` starts its next one."""
        return (
            operation.stream is stream
            or stream.clock.get(operation.stream, 0) >= operation.position
            or self._host_clock.get(operation.stream, 0) >= operation.position
        )


def _merge(clock: VectorClock, stream: RecordedStream, position: int, other: VectorClock) -> None:
    """Merge the first ``position`` operations of ``stream``, and ``other``, into ``clock``."""
    for key, count in ((stream, position), *other.items()):
        if clock.get(key, 0) < count:
            clock[key] = count
