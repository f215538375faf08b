"""What work waits for in a simulation: resources, its stream's queue, events, and other ranks.

A resource, such as a GPU's multiprocessors or one direction of a link, does one thing at a time. A
collective starts when all of its ranks are ready and its links are free: each GPU has at most one
outgoing and one incoming transfer at a time within its host, and one of each with other hosts. A
message waits for its receiver, as with NCCL. Ranks that aren't in the simulation are assumed to be
ready as soon as the others are.
"""

import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vgpu.time.steps import BeginStream, Copy, GroupCollective, LocalCollective, Program
from vgpu.time.timeline import HOST, TraceEvent

if TYPE_CHECKING:  # simulate.py imports this file
    from vgpu.time.simulate import Simulator


class Resource:
    """Something that does one thing at a time.

    Streams take turns. Work that starts late leaves a gap, which later-launched work may fill if
    it's ready sooner.
    """

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def free_from(self, ready_s: float, duration_s: float) -> float:
        """Return the start of the first free interval of ``duration_s`` from ``ready_s`` on."""
        starts, ends = self.starts, self.ends
        index = bisect.bisect_right(ends, ready_s)
        start_s = ready_s
        while index < len(starts) and start_s + duration_s > starts[index]:
            start_s = max(start_s, ends[index])
            index += 1
        return start_s

    def free_at(self, ready_s: float) -> float:
        """Return the first free time from ``ready_s`` on."""
        index = bisect.bisect_right(self.ends, ready_s)
        taken = index < len(self.starts) and self.starts[index] <= ready_s
        return self.ends[index] if taken else ready_s

    def worked_until(self, start_s: float, duration_s: float, lost: float = 1.0) -> float:
        """Return the end of work that starts at ``start_s`` and takes ``duration_s`` of free time.

        ``lost`` is the fraction of its speed that the work loses while the resource isn't free.
        """
        end_s = start_s + duration_s
        index = bisect.bisect_right(self.ends, start_s)
        while index < len(self.starts) and self.starts[index] < end_s:
            begin_s = max(start_s, self.starts[index])
            taken_s = self.ends[index] - begin_s
            if end_s - begin_s <= taken_s * (1 - lost):  # the work ends in this interval
                return begin_s + (end_s - begin_s) / (1 - lost)
            end_s += taken_s * lost
            index += 1
        return end_s

    def delay(self, start_s: float, end_s: float) -> None:
        """Pause between ``start_s`` and ``end_s``, which delays the work that was placed there.

        Later gaps absorb the delay. Work after a gap is delayed only if the gap is too short.
        """
        starts, ends = self.starts, self.ends
        index = bisect.bisect_right(ends, start_s)
        if index == len(starts) or starts[index] >= end_s:
            return
        ends[index] += end_s - max(start_s, starts[index])
        while index + 1 < len(starts) and starts[index + 1] <= ends[index]:
            late_s = ends[index] - starts.pop(index + 1)
            ends[index] = ends.pop(index + 1) + late_s

    def place(self, ready_s: float, duration_s: float) -> float:
        """Occupy the first free interval of that length from ``ready_s`` on; return its start."""
        starts, ends = self.starts, self.ends
        start_s = self.free_from(ready_s, duration_s)
        index = bisect.bisect_right(ends, start_s)
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


class Processors:
    """The multiprocessors of a GPU.

    Kernels take turns. A kernel on a high-priority stream overtakes others: it starts as soon as
    it's ready, which delays the end of the running kernel by its own duration. (Whenever a thread
    block ends, CUDA schedules the high-priority kernel's blocks first, and a block takes far less
    time than a kernel; CUDA C++ programming guide, Stream priorities.) All high-priority streams
    are treated the same.

    While a collective runs, kernels without high priority lose a fraction of their speed. A kernel
    that was placed before the collective keeps its times.
    """

    __slots__ = ("_collectives", "_lost", "_others", "_prior")

    def __init__(self, lost: float = 0.0) -> None:
        """``lost`` is the fraction of the multiprocessors that a collective occupies."""
        self._prior = Resource()  # kernels with high priority
        self._others = Resource()  # the rest; each includes the time of kernels that overtook it
        self._collectives = Resource(), Resource()  # inside the host, and between hosts
        self._lost = lost

    @property
    def busy_until_s(self) -> float:
        """The time at which the last kernel without high priority ends; 0 if there is none."""
        ends = self._others.ends
        return ends[-1] if ends else 0.0

    def place(self, ready_s: float, duration_s: float) -> tuple[float, float]:
        """Place a kernel at the first free time from ``ready_s`` on; return its start and end."""
        prior = self._prior
        if not self._lost and (not prior.ends or prior.ends[-1] <= ready_s):
            start_s = self._others.place(ready_s, duration_s)
            return start_s, start_s + duration_s
        start_s = ready_s
        while True:
            start_s = prior.free_at(start_s)
            takes_s = duration_s
            for collectives in self._collectives:
                takes_s = collectives.worked_until(start_s, takes_s, self._lost) - start_s
            takes_s = prior.worked_until(start_s, takes_s) - start_s
            later_s = self._others.free_from(start_s, takes_s)
            if later_s == start_s:
                break
            start_s = later_s
        self._others.place(start_s, takes_s)
        return start_s, start_s + takes_s

    def note_collective(self, start_s: float, end_s: float, between_hosts: bool) -> None:
        """Make a collective occupy multiprocessors; collectives over the same links take turns."""
        if self._lost:
            self._collectives[between_hosts].place(start_s, end_s - start_s)

    def place_prior(self, ready_s: float, duration_s: float) -> float:
        """Place a kernel with high priority; return its start.

        Kernels placed earlier that haven't ended by then are delayed.
        """
        start_s = self._prior.place(ready_s, duration_s)
        self._others.delay(start_s, start_s + duration_s)
        return start_s


def place_together(resources: Sequence[Resource], ready_s: float, duration_s: float) -> float:
    """Occupy the first interval of ``duration_s`` free in all ``resources``; return its start."""
    start_s = ready_s
    while True:
        later_s = max(resource.free_from(start_s, duration_s) for resource in resources)
        if later_s == start_s:
            break
        start_s = later_s
    for resource in resources:
        resource.place(start_s, duration_s)
    return start_s


# Threads, streams and their queues


@dataclass(slots=True)
class SimulatedThread:
    """One host thread, with its current time, and the time that it takes to launch an operation."""

    number: int
    now_s: float
    launch_s: float
    backward: bool  # whether it's a thread of the autograd engine
    ranges: list[tuple[str, float]] = field(default_factory=list)  # open ones, with their starts

    def traced(
        self, step: Copy | LocalCollective | GroupCollective, kind: str, end_s: float
    ) -> TraceEvent:
        """Return what's known about a copy or a collective before it starts."""
        return TraceEvent(
            name=step.name,
            kind=kind,
            device=HOST,
            stream=0,
            start_s=0.0,
            end_s=end_s,
            launch_s=self.now_s,
            thread=self.number,
            launching_s=self.launch_s,
            module=step.by.module,
            backward=step.by.backward,
            size_bytes=step.size_bytes,
        )


@dataclass(eq=False, slots=True)
class SimulatedStream:
    """One stream, with the time from which it's free, and the work that's queued on it."""

    device: torch.device
    number: int
    compute: Processors  # shared by all streams of the device
    has_priority: bool  # whether its kernels overtake those on other streams
    free_s: float = 0.0
    last_kernel: int | None = None  # its index in the simulator's trace
    queue: "deque[QueuedWork]" = field(default_factory=deque)  # the first item is waiting


class QueuedWork(NamedTuple):
    """Work that's queued on one or more streams, and runs when it's first in all their queues."""

    streams: Sequence[SimulatedStream]
    run: Callable[[], bool]  # returns False while it has to wait


class Queues:
    """The events of one program, and the work that waits for them."""

    def __init__(self) -> None:
        self.happened_s: list[float | None] = []  # when each event happened; None until it has
        self._waiting: dict[int, list[SimulatedStream]] = {}  # streams, by the event they wait for
        self._woken: deque[SimulatedStream] = deque()

    def time_s(self, event: int) -> float:
        """Return the time at which an event happened."""
        time_s = self.happened_s[event]
        assert time_s is not None, f"event {event} has not happened"
        return time_s

    def begin_event(self) -> int:
        self.happened_s.append(None)
        return len(self.happened_s) - 1

    def end_event(self, event: int, time_s: float) -> None:
        self.happened_s[event] = time_s
        if self._waiting:
            self._woken.extend(self._waiting.pop(event, ()))

    def wake_at(self, event: int, stream: SimulatedStream) -> None:
        """Make the first item in a stream's queue wait for an event."""
        self._waiting.setdefault(event, []).append(stream)

    def wake_later(self, stream: SimulatedStream) -> None:
        """Note that the first item in a stream's queue can run now."""
        self._woken.append(stream)

    def enqueue(self, streams: Sequence[SimulatedStream], run: Callable[[], bool]) -> None:
        """Run something now, or after everything that's already queued on these streams."""
        work = QueuedWork(streams, run)
        for stream in streams:
            stream.queue.append(work)
        if all(stream.queue[0] is work for stream in streams):
            self._go_on(streams[0])

    def wake(self) -> bool:
        """Resume the streams whose events have happened; return whether there were any."""
        some = bool(self._woken)
        while self._woken:
            self._go_on(self._woken.popleft())
        return some

    def _go_on(self, stream: SimulatedStream) -> None:
        while stream.queue:
            work = stream.queue[0]
            if any(other.queue[0] is not work for other in work.streams) or not work.run():
                return
            for other in work.streams:
                other.queue.popleft()
                if other is not stream and other.queue:
                    self._woken.append(other)


# Other ranks

Key = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class PendingCollective:
    """One rank's side of a collective that hasn't finished."""

    simulator: "Simulator"
    step: GroupCollective
    stream: SimulatedStream
    launch_s: float
    event: int
    ready_s: float | None = None  # None until the rank has arrived
    has_ended: bool = False

    @property
    def peers(self) -> list[int]:
        """The other participating ranks."""
        return [rank for rank in self.step.ranks if rank != self.simulator.rank]

    def __str__(self) -> str:
        step = self.step
        where = f" in {step.by.module}" if step.by.module else ""
        if step.is_message:
            way = "to" if step.name == "send" else "from"
            return f"{step.name} of {step.size_bytes:,} bytes {way} rank {self.peers[0]}{where}"
        return f"{step.name} of {step.size_bytes:,} bytes among ranks {list(step.ranks)}{where}"


class Rendezvous:
    """The ranks that are simulated together, and the collectives in which some of them wait."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = frozenset(ranks)
        self._arrived: dict[Key, list[PendingCollective]] = {}
        self._counts: Counter[Key] = Counter()

    def arrive(self, collective: PendingCollective) -> None:
        """Note that a rank is ready; once all are, start the collective and set its times."""
        key = self._key(collective)
        sides = self._arrived.setdefault(key, [])
        if sides:
            _check_alike(sides[0], collective)
        sides.append(collective)
        expected = [rank for rank in collective.step.ranks if rank in self.ranks]
        if len(sides) == len(expected):
            del self._arrived[key]
            _start(sides)
            for side in sides[:-1]:
                side.simulator.wake_later(side.stream)

    def _key(self, collective: PendingCollective) -> Key:
        """Return a key that all sides of a collective share: a group's collectives are numbered."""
        step, rank = collective.step, collective.simulator.rank
        ends = sorted(step.ranks)
        if step.name == "send":
            ends = [rank, *collective.peers]
        elif step.name == "recv":
            ends = [*collective.peers, rank]
        key = (step.group, step.is_message, tuple(ends))
        of_rank = (rank, step.name == "send", *key)
        self._counts[of_rank] += 1
        return (*key, self._counts[of_rank])


def _start(sides: list[PendingCollective]) -> None:
    step = sides[0].step
    ready_s = max(side.ready_s for side in sides if side.ready_s is not None)
    duration_s = max(
        side.simulator.costs.group_time_s(step.name, side.step.size_bytes, step.ranks)
        for side in sides
    )
    wires = [
        wire for side in sides for wire in side.simulator.wires(side.stream.device.index, side.step)
    ]
    start_s = place_together(wires, ready_s, duration_s)
    for side in sides:
        side.simulator.end_collective(side, start_s, start_s + duration_s)


def _check_alike(one: PendingCollective, other: PendingCollective) -> None:
    """Raise ValueError if two ranks call different collectives."""
    first, second = one.step, other.step
    same_name = {first.name, second.name} == {"send", "recv"} or first.name == second.name
    same_size = first.size_bytes == second.size_bytes or first.name == "all_to_all"
    if not same_name or not same_size:
        raise ValueError(
            f"ranks {one.simulator.rank} and {other.simulator.rank} make different calls in group "
            f"{first.group!r}, which has ranks {list(first.ranks)}: {first.name} of "
            f"{first.size_bytes:,} bytes and {second.name} of {second.size_bytes:,} bytes. All "
            "ranks of a group must call the same collectives in the same order"
        )


def check_ranks(programs: Sequence[Program]) -> None:
    """Raise ValueError for programs that can't be simulated together."""
    if not programs:
        raise ValueError("no recordings to join: pass the timeline of at least one rank")
    ranks = [program.rank for program in programs]
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(
            f"there are multiple recordings of rank {twice[0]}: join one per rank (got {ranks})"
        )
    for program in programs:
        used = {step.gpu for step in program.steps if isinstance(step, BeginStream)}
        if len(used) > 1:
            raise ValueError(
                f"rank {program.rank} used {len(used)} GPUs in its recording, but joined ranks "
                "must use one each"
            )
        for step in program.steps:
            if isinstance(step, GroupCollective) and step.is_message:
                lonely = [rank for rank in step.ranks if rank not in ranks]
                if lonely and len(programs) > 1:
                    raise ValueError(
                        f"rank {program.rank} calls {step.name} with rank {lonely[0]}, which has "
                        f"no recording: join one of that rank, too (joined ranks: {ranks})"
                    )
