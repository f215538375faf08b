"""Turns steps into a timeline, with new costs (``replay``) or for several ranks (``joined``).

A ``Simulator`` simulates one process: what its threads and streams do, and when.

The host needs a few microseconds to launch an operation. The operation starts on its stream when
the host has launched it, the stream is free, and the events it waits for have happened. A copy
between GPUs occupies the current streams of both GPUs. A host that reads a value waits for it.

A kernel on a high-priority stream overtakes others (resources.py). It may delay kernels that were
launched earlier and have already been simulated. If so, the last of them ends later by
its duration, and kernels launched from then on start after that; work that has already waited for
one of them keeps its times.

When simulated alone, a rank never waits for others: they're assumed to be ready whenever it is.
When it's simulated together with others, an event that a stream waits for may not have happened
yet. The stream's later work is then queued, and the host continues until it needs the event itself.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.time.compiler_passes import in_pieces
from vgpu.time.costs import CostModel
from vgpu.time.resources import (
    PendingCollective,
    Processors,
    Queues,
    Rendezvous,
    Resource,
    SimulatedStream,
    SimulatedThread,
    check_ranks,
)
from vgpu.time.steps import (
    BeginRange,
    BeginStream,
    BeginThread,
    Copy,
    EndRange,
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
    WaitEvent,
)
from vgpu.time.timeline import HOST, HostRange, Timeline, TraceEvent, in_order
from vgpu.time.workloads import Workload


class Deadlock(RuntimeError):
    """Ranks simulated together are waiting for each other, or for one that has finished."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect garbage less often: scanning many long-lived records is wasted work."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def simulate(programs: Sequence[Program]) -> Timeline:
    """Return the timeline of one program, or of multiple ranks' programs (see ``joined``)."""
    return _alone(programs[0]) if len(programs) == 1 else _together(programs)


def replay(timeline: Timeline, **changes: Any) -> Timeline:
    """Simulate the same operations again, with different costs.

    ``changes`` are fields of CostModel by name, such as ``arithmetic_share=0.3``, ``link="PCIe 4"``
    or ``network="Ethernet 100"``; ``gpu``, a preset or a GPUSpec, switches to another GPU, and to
    its link unless the link was chosen separately. Without changes, the new timeline is identical,
    bit for bit.

    Some things stay as recorded: decisions that the program based on times (``stream.query()``),
    races, the attention kernel chosen for the recorded GPU (an older GPU may only have a slower
    one), and which operations were fused. If operations were fused, ``async_tp`` can be changed.
    Raises ValueError for a timeline that wasn't recorded with ``record()``, and for a change of
    ``fuses``.
    """
    if "fuses" in changes:
        raise ValueError(
            "fusion is decided while a program runs, so replay() can't change it: record the "
            "program twice, once with record(fuses=True)"
        )
    if not timeline.programs:
        raise ValueError(
            "this timeline has no recorded steps to replay: use a timeline from record()"
        )
    return simulate([replace(p, costs=p.costs.changed(changes)) for p in timeline.programs])


def replay_beside(timeline: Timeline, others: Iterable[TraceEvent]) -> Timeline:
    """Replay one rank's timeline while earlier collectives are still running on its GPU.

    ``others`` are those collectives; their times are seconds since the start of the timeline, and
    can be negative. Their device is ignored: they can come from the recording of an equivalent
    rank.
    """
    (program,) = timeline.programs
    return _alone(program, others)


def joined(timelines: Sequence[Timeline]) -> Timeline:
    """Join timelines of ranks that were recorded separately, including waits for each other.

    The ranks' clocks start together and synchronize at collectives and messages: each of these
    starts when all of its recorded ranks are ready, and ranks without a recording are assumed to be
    ready, too. So it's enough to record one of several equivalent ranks, but a message needs both
    sender and receiver. The ranks become the timeline's devices, in rank order:
    ``timeline.ranks[k]`` is ``vgpu:k``.

    Raises ValueError if there are no recordings, more than one of the same rank, a rank that used
    multiple GPUs, a message from or to a rank without a recording, or calls that don't match.
    Raises Deadlock, which says where each rank waits, if no rank can continue.
    """
    return _together([program for timeline in timelines for program in timeline.programs])


@rarely_collected()
def _alone(program: Program, others: Iterable[TraceEvent] = ()) -> Timeline:
    simulator = Simulator(program.costs, program.rank)
    simulator.occupy(others, program.gpu)
    simulator.run(in_pieces(program))
    timeline = _timeline([program], program.gpus)
    timeline.events, timeline.host_ranges = in_order(simulator.trace), simulator.host_ranges
    timeline.host_s, timeline.makespan_s = simulator.end()
    timeline.races = [
        replace(race, device=timeline.devices[index]) for index, race in program.races
    ]
    return timeline


def _timeline(programs: Sequence[Program], count: int) -> Timeline:
    return Timeline(
        programs[0].costs.spec.name.removeprefix("Virtual "),
        [torch.device(gpus.DEVICE_TYPE, index) for index in range(count)],
        ranks=[program.rank for program in programs],
        programs=tuple(programs),
    )


# Multiple ranks


@rarely_collected()
def _together(programs: Sequence[Program]) -> Timeline:
    programs = sorted(programs, key=lambda program: program.rank)
    check_ranks(programs)
    rendezvous = Rendezvous(program.rank for program in programs)
    simulators = [
        Simulator(program.costs, program.rank, rendezvous, position)
        for position, program in enumerate(programs)
    ]
    _run_all(
        {
            simulator: simulator.run_beside_others(in_pieces(program))
            for simulator, program in zip(simulators, programs, strict=True)
        }
    )
    timeline = _timeline(programs, len(simulators))
    ends = [simulator.end() for simulator in simulators]
    timeline.host_s, timeline.makespan_s = (max(times) for times in zip(*ends, strict=True))
    timeline.events = in_order(event for simulator in simulators for event in simulator.trace)
    timeline.host_ranges = [each for simulator in simulators for each in simulator.host_ranges]
    for program, device in zip(programs, timeline.devices, strict=True):
        timeline.races += [replace(race, device=device) for _, race in program.races]
    return timeline


def _run_all(runs: "dict[Simulator, Iterator[None]]") -> None:
    """Simulate each rank until it has to wait for another, then switch to the next.

    If all ranks reach their collectives in the same order, each rank's steps are simulated in the
    same order as if it were alone. Otherwise, one rank's host runs ahead and launches more.
    """
    going = dict(runs)
    while able := [simulator for simulator in going if not simulator.host_waits]:
        for simulator in [each for each in able if not each.pending] or able[:1]:
            if next(going[simulator], _ENDED) is _ENDED:
                del going[simulator]
            while any([other.wake() for other in runs]):
                pass
    if any(simulator.pending for simulator in runs):
        raise Deadlock(_who_waits(list(runs)))


_ENDED = object()


def _who_waits(simulators: "Sequence[Simulator]") -> str:
    lines = ["the joined ranks wait for each other, and none can continue:"]
    for simulator in simulators:
        pending = list(simulator.pending.values())
        arrived = [collective for collective in pending if collective.ready_s is not None]
        what = f"is waiting in {(arrived or pending)[0]}" if pending else "has finished"
        lines.append(f"  rank {simulator.rank} {what}")
    lines.append("All ranks of a group must call the same collectives in the same order.")
    return "\n".join(lines)


# One process


class Simulator(Queues):
    """Simulates one program. All times are seconds since it started."""

    def __init__(
        self,
        costs: CostModel,
        rank: int = 0,
        rendezvous: Rendezvous | None = None,
        position: int | None = None,
    ) -> None:
        """``rendezvous`` is where ranks wait for each other; by default, this rank is alone.

        In a timeline of multiple ranks, ``position`` is the index of this rank's only GPU, and of
        its host.
        """
        super().__init__()
        self.costs = costs
        self.rank = rank
        self.trace: list[TraceEvent] = []
        self.host_ranges: list[HostRange] = []
        self.threads: list[SimulatedThread] = []
        self.streams: list[SimulatedStream] = []
        self.pending: dict[int, PendingCollective] = {}  # by their event
        self._rendezvous = rendezvous or Rendezvous([rank])
        self._position = position
        self._awaited: int | None = None  # the event for which the host waits
        self._processors: dict[int, Processors] = {}
        self._links: dict[tuple[int | None, ...], Resource] = {}
        # Keys hold a GPU, whether the wire leads to other hosts, and the direction as seen from the
        # GPU.
        self._wires: dict[tuple[int, bool, str], Resource] = {}
        self._durations_s: dict[Workload, float] = {}
        self._handlers: dict[type, Callable[..., object]] = {
            BeginRange: self._begin_range,
            BeginStream: self._begin_stream,
            BeginThread: self._begin_thread,
            Copy: self._copy,
            EndRange: self._end_range,
            GroupCollective: self._group_collective,
            HostWait: self._host_wait,
            HostWork: self._host_work,
            JoinThreads: self._join_threads,
            Kernel: self._kernel,
            LocalCollective: self._local_collective,
            QueryEvent: self._query_event,
            RecordEvent: self._record_event,
            WaitEvent: self._wait_event,
        }

    def run(self, steps: Iterable[ProgramStep]) -> None:
        """Simulate steps of a single rank, which never waits for others."""
        handlers = self._handlers
        for step in steps:
            handlers[type(step)](step)

    def run_beside_others(self, steps: Iterable[ProgramStep]) -> Iterator[None]:
        """Simulate all steps; yield when a collective or the host has to wait for other ranks."""
        handlers = self._handlers
        for step in steps:
            kind = type(step)
            if kind is HostWait or kind is QueryEvent:
                self._awaited = step.event  # type: ignore[union-attr]
                while self.host_waits:
                    yield
                self._awaited = None
            handlers[kind](step)
            if kind is GroupCollective and self.pending:
                yield

    @property
    def host_waits(self) -> bool:
        """Whether the host is waiting for an event that hasn't happened yet."""
        return self._awaited is not None and self.happened_s[self._awaited] is None

    def end(self) -> tuple[float, float]:
        """Return the seconds until the main thread has finished, and until everything has."""
        host_s = self.threads[0].now_s if self.threads else 0.0
        return host_s, max([host_s, *(stream.free_s for stream in self.streams)])

    def occupy(self, others: Iterable[TraceEvent], gpu: int) -> None:
        """Make collectives from before the program occupy a GPU's wires and multiprocessors."""
        for event in sorted(others, key=lambda event: event.start_s):
            start_s = max(0.0, event.start_s)
            for wire in self.wires(gpu, event):
                wire.place(start_s, event.end_s - start_s)
            self._take_processors(self._processors_of(gpu), event)

    # Threads

    def _begin_thread(self, step: BeginThread) -> None:
        now_s = 0.0 if step.parent is None else self.threads[step.parent].now_s
        costs = self.costs
        launch_s = costs.launch_s(step.sharing) if step.sharing else costs.engine_launch_s
        self.threads.append(SimulatedThread(step.number, now_s, launch_s, not step.sharing))

    def _join_threads(self, step: JoinThreads) -> None:
        thread = self.threads[step.thread]
        thread.now_s = max([thread.now_s, *(self.threads[other].now_s for other in step.others)])

    def _host_work(self, step: HostWork) -> None:
        thread = self.threads[step.thread]
        start_s, thread.now_s = thread.now_s, thread.now_s + step.duration_s
        self._note_range(step.name, "work", thread, start_s)

    def _begin_range(self, step: BeginRange) -> None:
        thread = self.threads[step.thread]
        thread.ranges.append((step.name, thread.now_s))

    def _end_range(self, step: EndRange) -> None:
        thread = self.threads[step.thread]
        name, start_s = thread.ranges.pop()
        self._note_range(name, "range", thread, start_s)

    def _note_range(self, name: str, kind: str, thread: SimulatedThread, start_s: float) -> None:
        device = torch.device(gpus.DEVICE_TYPE, self._position or 0)
        self.host_ranges.append(
            HostRange(name, kind, device, thread.number, thread.backward, start_s, thread.now_s)
        )

    def _host_wait(self, step: HostWait) -> None:
        thread, time_s = self.threads[step.thread], self.time_s(step.event)
        if time_s > thread.now_s:
            row, now_s = self._position, thread.now_s
            row = thread.number if row is None else row
            self.trace.append(TraceEvent(step.name, "wait", HOST, row, now_s, time_s, now_s))
            thread.now_s = time_s

    def _query_event(self, step: QueryEvent) -> None:
        thread = self.threads[step.thread]
        if thread.now_s < self.time_s(step.event):
            thread.now_s += self.costs.python_launch_s  # so that a polling loop terminates

    # Streams

    def _begin_stream(self, step: BeginStream) -> None:
        compute = self._processors_of(step.gpu)
        index = step.gpu if self._position is None else self._position
        device = torch.device(gpus.DEVICE_TYPE, index)
        self.streams.append(SimulatedStream(device, step.number, compute, step.priority < 0))

    def _processors_of(self, gpu: int) -> Processors:
        return self._processors.setdefault(gpu, Processors(self.costs.lost_beside_collectives))

    def _record_event(self, step: RecordEvent) -> None:
        stream, event = self.streams[step.stream], self.begin_event()
        host_s = 0.0 if step.thread is None else self.threads[step.thread].now_s

        def run() -> bool:
            self.end_event(event, max(stream.free_s, host_s))
            return True

        self.enqueue((stream,), run)

    def _wait_event(self, step: WaitEvent) -> None:
        stream = self.streams[step.stream]

        def run() -> bool:
            time_s = self.happened_s[step.event]
            if time_s is None:
                self.wake_at(step.event, stream)
                return False
            stream.free_s = max(stream.free_s, time_s)
            return True

        self.enqueue((stream,), run)

    def _kernel(self, step: Kernel) -> None:
        thread = self.threads[step.by.thread]
        thread.now_s += thread.launch_s
        launch_s = thread.now_s
        event = self.begin_event()
        stream = self.streams[step.stream]
        if stream.queue:
            self.enqueue((stream,), lambda: self._run_kernel(step, stream, thread, launch_s, event))
        else:  # nearly always, and faster
            self._run_kernel(step, stream, thread, launch_s, event)

    def _run_kernel(
        self,
        step: Kernel,
        stream: SimulatedStream,
        thread: SimulatedThread,
        launch_s: float,
        event: int,
    ) -> bool:
        work = step.work
        duration_s = self._durations_s.get(work)
        if duration_s is None:
            duration_s = self._durations_s[work] = self.costs.kernel_time_s(work)
        ready_s = launch_s if launch_s > stream.free_s else stream.free_s
        if stream.has_priority:
            start_s = self._overtake(stream, ready_s, duration_s)
            end_s = start_s + duration_s
        else:
            start_s, end_s = stream.compute.place(ready_s, duration_s)
        stream.free_s = end_s
        stream.last_kernel = len(self.trace)
        self.trace.append(
            TraceEvent(
                step.name,
                "kernel",
                stream.device,
                stream.number,
                start_s,
                end_s,
                launch_s,
                step.by.module,
                step.by.backward,
                work.flop,
                work.size_bytes,
                thread=thread.number,
                launching_s=thread.launch_s,
            )
        )
        self.end_event(event, end_s)
        return True

    def _overtake(self, stream: SimulatedStream, ready_s: float, duration_s: float) -> float:
        """Run a kernel ahead of those on streams without high priority; return its start."""
        compute = stream.compute
        busy_until_s = compute.busy_until_s
        start_s = compute.place_prior(ready_s, duration_s)
        if compute.busy_until_s > busy_until_s:
            for other in self.streams:
                if other.compute is not compute or other.has_priority or other.last_kernel is None:
                    continue
                last = self.trace[other.last_kernel]
                if last.end_s == other.free_s == busy_until_s:
                    other.free_s = compute.busy_until_s
                    self.trace[other.last_kernel] = last._replace(end_s=other.free_s)
        return start_s

    def _local_collective(self, step: LocalCollective) -> None:
        thread = self.threads[step.by.thread]
        streams = [self.streams[stream] for stream in step.streams]
        thread.now_s += thread.launch_s * len(streams)
        duration_s = self.costs.collective_time_s(step.name, step.size_bytes, len(streams))
        self._transfer(streams, thread.traced(step, "collective", duration_s))

    def _copy(self, step: Copy) -> None:
        thread = self.threads[step.by.thread]
        source = None if step.source is None else self.streams[step.source]
        target = None if step.target is None else self.streams[step.target]
        thread.now_s += thread.launch_s
        is_between = source is not None and target is not None
        time_s = self.costs.copy_time_s if is_between else self.costs.host_copy_time_s
        traced = thread.traced(step, "copy", time_s(step.size_bytes))._replace(
            source=source.device if source else HOST, target=target.device if target else HOST
        )
        streams = [stream for stream in (source, target) if stream is not None]
        self._transfer(streams, traced, self._link(source, target))

    def _transfer(
        self, streams: Sequence[SimulatedStream], traced: TraceEvent, link: Resource | None = None
    ) -> None:
        """Occupy the streams and the link; ``traced`` starts at 0 and ends after the duration."""
        event, duration_s = self.begin_event(), traced.end_s

        def run() -> bool:
            start_s = max(traced.launch_s, *(stream.free_s for stream in streams))
            if link is not None:
                start_s = link.place(start_s, duration_s)
            timed = traced._replace(start_s=start_s, end_s=start_s + duration_s)
            self._finish(streams, timed, event)
            return True

        self.enqueue(streams, run)

    def _link(self, source: SimulatedStream | None, target: SimulatedStream | None) -> Resource:
        """Return the link from one device to another; copies in one direction take turns on it."""
        key = tuple(end.device.index if end else None for end in (source, target))
        return self._links.setdefault(key, Resource())

    def _finish(self, streams: Sequence[SimulatedStream], traced: TraceEvent, event: int) -> None:
        """Record a copy or collective, whose times are known now, on each of its streams."""
        for stream in streams:
            self.trace.append(traced._replace(device=stream.device, stream=stream.number))
            stream.free_s = traced.end_s
        self.end_event(event, traced.end_s)

    # Collectives

    def _group_collective(self, step: GroupCollective) -> None:
        thread = self.threads[step.by.thread]
        thread.now_s += thread.launch_s
        event = self.begin_event()
        stream = self.streams[step.stream]
        collective = PendingCollective(self, step, stream, thread.now_s, event)
        self.pending[event] = collective
        self.enqueue((stream,), lambda: collective.has_ended or self._arrive(collective))

    def _arrive(self, collective: PendingCollective) -> bool:
        if collective.ready_s is None:
            collective.ready_s = max(collective.launch_s, collective.stream.free_s)
            self._rendezvous.arrive(collective)
        return collective.has_ended

    def wires(self, gpu: int, step: GroupCollective | TraceEvent) -> list[Resource]:
        """Return the wires that a collective occupies on a GPU: outgoing, incoming, or both."""
        between = self._is_between_hosts(step.ranks)
        ways = {"send": ("out",), "recv": ("in",)}.get(step.name, ("out", "in"))
        return [self._wires.setdefault((gpu, between, way), Resource()) for way in ways]

    def end_collective(self, collective: PendingCollective, start_s: float, end_s: float) -> None:
        """Finish a collective, whose times are known now."""
        step, stream = collective.step, collective.stream
        thread = self.threads[step.by.thread]
        traced = thread.traced(step, "collective", end_s)._replace(
            launch_s=collective.launch_s,
            start_s=start_s,
            group=step.group,
            elements=step.elements,
            ranks=step.ranks,
            link=self.costs.link_name(step.ranks),
            ready_s=collective.ready_s,
        )
        self._take_processors(stream.compute, traced)
        collective.has_ended = True
        del self.pending[collective.event]
        self._finish([stream], traced, collective.event)

    def _take_processors(self, compute: Processors, traced: TraceEvent) -> None:
        """Make a collective take multiprocessors from concurrent kernels."""
        if traced.name not in ("send", "recv", "permute"):  # copy engines do those
            between = self._is_between_hosts(traced.ranks)
            compute.note_collective(max(0.0, traced.start_s), traced.end_s, between)

    def _is_between_hosts(self, ranks: Sequence[int]) -> bool:
        return len(self.costs.hosts_of(ranks)) > 1
