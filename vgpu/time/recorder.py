"""What a recording appends to: the steps of the program so far, simulated when somebody asks.

Here is what is known of the order of the steps: which thread issues one on which stream, and what is
sure to have ended before it. What time they take is the simulator's business (simulator.py); nobody
needs it while a program runs, unless the program itself asks (``event.query()``) or reads a value
that may not be written yet (races.py). Nothing here depends on real time or on how threads interleave.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.time.call_sites import HostThread, HostThreads
from vgpu.time.costs import CostModel, Workload, check_seconds
from vgpu.time.fusion import Fusion
from vgpu.time.happens_before import (
    DeferredResult,
    Enqueued,
    RecordedEvent,
    RecordedStream,
    VectorClock,
    merge,
)
from vgpu.time.simulator import Simulator
from vgpu.time.steps import (
    BeginStream,
    BeginThread,
    Copy,
    Deferred,
    GraphBreak,
    GroupCollective,
    HostWait,
    HostWork,
    JoinThreads,
    Kernel,
    LocalCollective,
    NeedResults,
    Operands,
    Program,
    ProgramStep,
    QueryEvent,
    Read,
    RecordEvent,
    WaitEvent,
)


class Recorder:
    """The steps of one recording. All times are seconds since it began."""

    def __init__(self, costs: CostModel, rank: int = 0) -> None:
        self.costs = costs
        self.rank = rank
        self.recording = object()  # what tells its streams from those of other recordings
        self.steps: list[ProgramStep] = []
        self.several_streams = False  # whether a GPU has had more than its default stream
        self._lock = threading.RLock()  # events are numbered, and DataParallel has several threads
        self._events = 0
        self._threads = 0
        self._streams: dict[tuple[int, int], RecordedStream] = {}
        self._host_clock: VectorClock = {}
        self._timed: list[RecordedEvent] = []
        self._gpu, self._gpus = gpus.current_index(), gpus.device_count()
        self._simulator = Simulator(costs, rank)
        self._simulated = 0
        # Where elementwise operations are fused: the pass, how many steps it has had, and what it
        # made. It begins with the first operation of compiled code: what comes before stays as it is.
        self._fusion = Fusion() if costs.fuses else None
        self._fused_from = 0
        self._fused: list[ProgramStep] = []
        self.threads = HostThreads(self)

    def _begin_event(self, step: ProgramStep) -> int:
        with self._lock:
            self.steps.append(step)
            self._events += 1
            return self._events - 1

    # Times, when somebody asks

    def time_s(self, event: int) -> float:
        """When an event happens."""
        simulator = self.simulated()
        return simulator.time_s(self._fusion.number_of[event] if self._fusion else event)

    def ready_s(self, stream: RecordedStream, host: HostThread) -> float:
        """When the next operation could start on the stream at the earliest."""
        simulator = self.simulated()
        thread = simulator.threads[host.index]
        return max(thread.now_s + thread.launch_s, simulator.streams[stream.index].free_s)

    def simulated(self) -> Simulator:
        """All steps so far, simulated."""
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

    def end(self) -> Program:
        """The program, when its block has ended."""
        self.host()  # goes on when its last backward pass has returned
        self.break_graph(None)
        for event in self._timed:
            event.time_s = self.time_s(event.operation.event)
        with self._lock:
            steps = self._steps_after_fusion()
        kept = self._fusion.kept if self._fusion else frozenset[int]()
        return Program(self.costs, self.rank, self._gpu, self._gpus, steps, kept=kept)

    # Threads

    def host(self) -> HostThread:
        """The calling thread; in a backward pass, the engine's that runs the node."""
        return self.threads.issuing()

    def begin_thread(self, number: int, parent: HostThread | None, sharing: int) -> HostThread:
        with self._lock:
            parent_index = None if parent is None else parent.index
            self.steps.append(BeginThread(number, parent_index, sharing))
            self._threads += 1
            return HostThread(self._threads - 1, number)

    def join_threads(self, host: HostThread, others: Iterable[HostThread]) -> None:
        """A thread goes on when the others have got as far."""
        self.steps.append(JoinThreads(host.index, tuple(other.index for other in others)))

    def spend(self, duration_s: float) -> None:
        """The host computes something itself for so long."""
        check_seconds("duration_s", duration_s)
        self.steps.append(HostWork(self.host().index, duration_s))

    def host_waits(self, streams: Iterable[RecordedStream], name: str, host: HostThread) -> None:
        """The thread goes on when all that is enqueued on the streams has ended."""
        for stream in streams:
            event = self._begin_event(RecordEvent(stream.index))
            self.steps.append(HostWait(host.index, event, name))
            merge(self._host_clock, stream, stream.count, stream.clock)

    # Streams and events

    def stream(self, gpu: VirtualGPU, number: int) -> RecordedStream:
        """A stream of ``gpu``; 0 is the default one."""
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
        """Those on which something was enqueued in this recording."""
        return [stream for stream in self._streams.values() if stream.device == gpu.device]

    def wait_stream(self, stream: RecordedStream, other: RecordedStream) -> None:
        """What comes later on ``stream`` starts after all that is on ``other``: a program's wait.

        Compiled code ends there, on both.
        """
        self.break_graph(stream)
        self.break_graph(other)
        self.wait_enqueued(stream, other)

    def wait_enqueued(self, stream: RecordedStream, other: RecordedStream) -> None:
        """The same for a collective within compiled code: it goes on."""
        event = self._begin_event(RecordEvent(other.index))
        self.steps.append(WaitEvent(stream.index, event))
        merge(stream.clock, other, other.count, other.clock)

    def wait_operation(self, stream: RecordedStream, operation: Enqueued) -> None:
        """What comes later on ``stream`` starts after one operation of another stream."""
        self.steps.append(WaitEvent(stream.index, operation.event))
        stream.wait_for(operation)

    def record_event(self, stream: RecordedStream, is_timed: bool) -> RecordedEvent:
        """An event after what is on the stream so far. is_timed: whether its time may be asked."""
        self.break_graph(stream)
        event = self._begin_event(RecordEvent(stream.index, self.host().index))
        operation = self._enqueued(stream, event, "event", False)
        recorded = RecordedEvent(operation._replace(clock=dict(stream.clock)))
        if is_timed:
            self._timed.append(recorded)
        return recorded

    def wait_event(self, stream: RecordedStream, event: RecordedEvent | None) -> None:
        """What comes later on the stream starts after the event, if this recording has it."""
        self.break_graph(stream)  # what was enqueued before does not wait
        if event is not None and event.recording is self.recording:
            self.wait_operation(stream, event.operation)

    def host_waits_for_event(self, event: RecordedEvent | None) -> None:
        """The calling thread goes on after the event, if this recording has it."""
        if event is not None and event.recording is self.recording:
            operation = event.operation
            self.steps.append(HostWait(self.host().index, operation.event, "synchronize"))
            self._host_saw(operation)

    def query_stream(self, stream: RecordedStream) -> bool:
        """Whether all that is enqueued on the stream has ended; then the host knows of it."""
        self.break_graph(stream)
        event = self._begin_event(RecordEvent(stream.index))
        operation = self._enqueued(stream, event, "query", False)
        return self._query(operation._replace(clock=stream.clock))

    def query_event(self, event: RecordedEvent | None) -> bool:
        """Whether the event has happened; one of no or another recording has."""
        if event is None or event.recording is not self.recording:
            return True
        return self._query(event.operation)

    def _query(self, operation: Enqueued) -> bool:
        host = self.host()
        end_s = self.time_s(operation.event)
        has_ended = self._simulator.threads[host.index].now_s >= end_s
        self.steps.append(QueryEvent(host.index, operation.event))
        if has_ended:
            self._host_saw(operation)
        return has_ended

    def _host_saw(self, operation: Enqueued) -> None:
        """The host knows that an operation has ended."""
        merge(self._host_clock, operation.stream, operation.position, operation.clock or {})

    def happens_before(self, operation: Enqueued, stream: RecordedStream) -> bool:
        """Whether the next operation of ``stream`` is sure to start after this one has ended."""
        return (
            operation.stream is stream
            or stream.clock.get(operation.stream, 0) >= operation.position
            or self._host_clock.get(operation.stream, 0) >= operation.position
        )

    # Operations

    def kernel(
        self,
        name: str,
        stream: RecordedStream,
        host: HostThread,
        work: Workload,
        operands: Operands,
    ) -> Enqueued:
        """Launch one operation."""
        event = self._begin_event(
            Kernel(
                name,
                host.index,
                stream.index,
                host.module,
                host.backward,
                work.with_current_tf32(),
                operands,
            )
        )
        stream.count += 1
        return self._enqueued(stream, event, name, host.backward)

    def local_collective(
        self, name: str, streams: Sequence[RecordedStream], host: HostThread, size_bytes: int
    ) -> None:
        """Launch a collective among several GPUs of this process: its streams are busy.

        It starts when all of them are free, and their later work comes after it.
        """
        indices = tuple(stream.index for stream in streams)
        self._begin_event(
            LocalCollective(name, host.index, indices, host.module, host.backward, size_bytes)
        )
        self._take_part(streams)

    def group_collective(
        self,
        name: str,
        stream: RecordedStream,
        host: HostThread,
        size_bytes: int,
        ranks: Sequence[int],
        group: str,
        issued_on: RecordedStream,
        operands: Operands,
    ) -> Enqueued:
        """Launch this rank's side of a collective, on a stream of its process group.

        issued_on: the stream that was current. Collectives take turns on a GPU's links, and on its
        host's adapters.
        """
        step = GroupCollective(
            name,
            host.index,
            stream.index,
            host.module,
            host.backward,
            size_bytes,
            tuple(ranks),
            group,
            issued_on.index,
            operands,
        )
        event = self._begin_event(step)
        stream.count += 1
        operation = self._enqueued(stream, event, name, host.backward)
        return operation._replace(clock=dict(stream.clock))

    def copy(
        self,
        source: RecordedStream | None,
        target: RecordedStream | None,
        host: HostThread,
        size_bytes: int,
        blocking: bool,
        operands: Operands,
    ) -> list[Enqueued]:
        """Launch a copy; source or target is None on the host's side.

        Between GPUs it starts when both streams are free and occupies both; their later work
        comes after it (``copy_kernel_cuda`` in Copy.cu does so with two events).
        """
        event = self._begin_event(
            Copy(
                host.index,
                host.module,
                host.backward,
                size_bytes,
                None if source is None else source.index,
                None if target is None else target.index,
                operands,
            )
        )
        streams = [stream for stream in (source, target) if stream is not None]
        self._take_part(streams)
        operations = [self._enqueued(stream, event, "copy", host.backward) for stream in streams]
        if blocking:
            self.host_waits(streams, "copy", host)
        return operations

    def _take_part(self, streams: Sequence[RecordedStream]) -> None:
        """They took part in one operation: what comes later on each starts after it."""
        for stream in streams:
            stream.count += 1
        for stream in streams:
            for other in streams:
                if other is not stream:
                    merge(stream.clock, other, other.count, other.clock)

    def allocation(self, name: str, stream: RecordedStream, backward: bool) -> Enqueued:
        """Memory is allocated on the stream: what came before there may still use it."""
        event = self._begin_event(RecordEvent(stream.index))
        return self._enqueued(stream, event, name, backward)

    def _enqueued(self, stream: RecordedStream, event: int, name: str, backward: bool) -> Enqueued:
        return Enqueued(stream, stream.count, event, name, backward)

    # Where elementwise operations are fused

    @property
    def has_deferred(self) -> bool:
        """Whether some of the operations so far may have been deferred."""
        return self._fusion is not None

    def defer(
        self,
        name: str,
        stream: RecordedStream,
        host: HostThread,
        reads: tuple[Read, ...],
        written_bytes: int,
    ) -> Enqueued:
        """An elementwise operation: one kernel makes its result and its neighbors', or none does."""
        with self._lock:
            self._fusion = self._fusion or Fusion()
        step = Deferred(
            name, host.index, stream.index, host.module, host.backward, reads, written_bytes
        )
        event = self._begin_event(step)
        stream.count += 1
        result = DeferredResult(event, weakref.ref(self))
        return Enqueued(stream, stream.count, event, name, host.backward, deferred=result)

    def need(self, events: tuple[int, ...], host: HostThread) -> None:
        """A thread needs the results of deferred operations in memory."""
        self.steps.append(NeedResults(events, host.index, host.module, host.backward))

    def break_graph(self, stream: RecordedStream | None) -> None:
        """Compiled code ends here: nothing stays deferred on a stream, or on any for None."""
        if self._fusion is not None:
            host, index = self.host(), None if stream is None else stream.index
            self.steps.append(GraphBreak(index, host.index, host.module, host.backward))
