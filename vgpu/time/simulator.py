"""Plays a program: when the threads, streams and copies of one process do what.

The host needs a few microseconds to hand an operation over. The operation starts on its stream
when the host has handed it over, the stream is free, and the moments it waits for have come. A
copy between GPUs occupies the current streams of both. A host that asks for a value waits.

A kernel on a stream with priority passes the others (units.py). What it holds up may have its times
already, since it was handed over before. Then the last of them ends so much later, and what is handed
over from then on comes behind it; what waited for one of them before stays where it is.

Alone, a rank never waits for others: they are taken to be where it is. Together with them
(joint.py) a moment may not have come yet. Then what its stream is given later stands in line, and
the host goes on until it needs that moment itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from vgpu.memory import gpus
from vgpu.time.costs import CostModel, Work
from vgpu.time.queues import Lane, Lines, ThreadTime, Turn
from vgpu.time.rendezvous import Meeting, Part
from vgpu.time.resources import Processors, Unit
from vgpu.time.steps import (
    Ask,
    Collective,
    Copy,
    HostWait,
    Join,
    Kernel,
    Mark,
    Spend,
    Step,
    Stream,
    Thread,
    Together,
    Wait,
)
from vgpu.time.trace import HOST, TraceEvent


class Player(Lines):
    """The time of one program. All times are seconds since it began."""

    def __init__(
        self,
        model: CostModel,
        rank: int = 0,
        meeting: Meeting | None = None,
        place: int | None = None,
    ) -> None:
        """meeting: where ranks wait for one another; alone in one unless given.

        place: the number of this rank's only GPU, and of its host, in a timeline of several ranks.
        """
        super().__init__()
        self.model = model
        self.rank = rank
        self.events: list[TraceEvent] = []
        self.threads: list[ThreadTime] = []
        self.lanes: list[Lane] = []
        self.outstanding: dict[int, Part] = {}  # collectives that have not ended, by their moment
        self.waits_for: int | None = None  # the moment for which the host waits
        self._meeting = meeting or Meeting([rank])
        self._place = place
        self._compute: dict[int, Processors] = {}
        self._links: dict[tuple[int, int], Unit] = {}
        # Of a GPU: inside its host or out of it, and out of or into the GPU.
        self._wires: dict[tuple[int, bool, str], Unit] = {}
        self._seconds: dict[Work, float] = {}
        self._does: dict[type, Callable[..., int | None]] = {
            Ask: self._ask,
            Collective: self._collective,
            Copy: self._copy,
            HostWait: self._host_wait,
            Join: self._join,
            Kernel: self._kernel,
            Mark: self._mark,
            Spend: self._spend,
            Stream: self._stream,
            Thread: self._thread,
            Together: self._together,
            Wait: self._wait,
        }

    def take_up(self, others: Iterable[TraceEvent], gpu: int) -> None:
        """Collectives that were begun before the program, and still occupy what they use of a GPU."""
        for event in sorted(others, key=lambda event: event.start_s):
            start_s = max(0.0, event.start_s)
            for wire in self._wires_of(gpu, event.name, event.ranks):
                wire.place(start_s, event.end_s - start_s)
            self._beside_kernels(
                self._processors(gpu), event.name, event.ranks, start_s, event.end_s
            )

    def do(self, step: Step) -> int | None:
        """Do one step; returns the number of the moment that it begins, if it begins one."""
        return self._does[type(step)](step)

    def play(self, steps: Iterable[Step]) -> Iterator[None]:
        """Do all steps; yields where a collective or the host has to wait for other ranks."""
        for step in steps:
            kind = type(step)
            if kind is HostWait or kind is Ask:
                self.waits_for = step.moment  # type: ignore[union-attr]
                while self.moments[self.waits_for] is None:
                    yield
                self.waits_for = None
            self._does[kind](step)
            if kind is Collective and self.outstanding:
                yield

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for a moment that has not come."""
        return self.waits_for is not None and self.moments[self.waits_for] is None

    def end(self) -> tuple[float, float]:
        """Seconds until the first thread had ended, and until everything had."""
        host_s = self.threads[0].now_s if self.threads else 0.0
        return host_s, max([host_s, *(lane.free_s for lane in self.lanes)])

    # Threads

    def _thread(self, step: Thread) -> None:
        now_s = 0.0 if step.parent is None else self.threads[step.parent].now_s
        model = self.model
        launch_s = model.launch_s(step.sharing) if step.sharing else model.engine_launch_s
        self.threads.append(ThreadTime(step.number, now_s, launch_s))

    def _join(self, step: Join) -> None:
        thread = self.threads[step.thread]
        thread.now_s = max([thread.now_s, *(self.threads[other].now_s for other in step.others)])

    def _spend(self, step: Spend) -> None:
        self.threads[step.thread].now_s += step.duration_s

    def _host_wait(self, step: HostWait) -> None:
        thread, time_s = self.threads[step.thread], self.come(step.moment)
        if time_s > thread.now_s:
            self.events.append(
                TraceEvent(
                    name=step.name,
                    kind="wait",
                    device=HOST,
                    stream=thread.number if self._place is None else self._place,
                    start_s=thread.now_s,
                    end_s=time_s,
                    launch_s=thread.now_s,
                )
            )
            thread.now_s = time_s

    def _ask(self, step: Ask) -> None:
        thread = self.threads[step.thread]
        if thread.now_s < self.come(step.moment):
            thread.now_s += self.model.python_launch_s  # so that a loop that asks ends

    # Streams

    def _stream(self, step: Stream) -> None:
        compute = self._processors(step.gpu)
        index = step.gpu if self._place is None else self._place
        device = torch.device(gpus.DEVICE_TYPE, index)
        self.lanes.append(Lane(device, step.number, compute, step.priority < 0))

    def _processors(self, gpu: int) -> Processors:
        return self._compute.setdefault(gpu, Processors(self.model.lost_beside_collectives))

    def _mark(self, step: Mark) -> int:
        lane, moment = self.lanes[step.stream], self.begin_moment()
        host_s = 0.0 if step.thread is None else self.threads[step.thread].now_s

        def run() -> bool:
            self.end_moment(moment, max(lane.free_s, host_s))
            return True

        if lane.line:
            lane.line.append(Turn((lane,), run))
        else:
            run()
        return moment

    def _wait(self, step: Wait) -> None:
        lane = self.lanes[step.stream]
        if not lane.line and (time_s := self.moments[step.moment]) is not None:
            lane.free_s = max(lane.free_s, time_s)
            return

        def run() -> bool:
            time_s = self.moments[step.moment]
            if time_s is None:
                self.wake_at(step.moment, lane)
                return False
            lane.free_s = max(lane.free_s, time_s)
            return True

        self.give((lane,), run)

    def _kernel(self, step: Kernel) -> int:
        thread = self.threads[step.thread]
        thread.now_s += thread.launch_s
        launch_s = thread.now_s
        moment = self.begin_moment()
        lane = self.lanes[step.stream]
        if lane.line:
            lane.line.append(Turn((lane,), lambda: self._run_kernel(step, lane, launch_s, moment)))
        else:
            self._run_kernel(step, lane, launch_s, moment)
        return moment

    def _run_kernel(self, step: Kernel, lane: Lane, launch_s: float, moment: int) -> bool:
        work = step.work
        duration_s = self._seconds.get(work)
        if duration_s is None:
            duration_s = self._seconds[work] = self.model.kernel_time_s(work)
        ready_s = launch_s if launch_s > lane.free_s else lane.free_s
        if lane.first:
            start_s = self._pass(lane, ready_s, duration_s)
            end_s = start_s + duration_s
        else:
            start_s, end_s = lane.compute.place(ready_s, duration_s)
        lane.free_s = end_s
        lane.kernel = len(self.events)
        self.events.append(
            TraceEvent(
                step.name,
                "kernel",
                lane.device,
                lane.number,
                start_s,
                end_s,
                launch_s,
                step.module,
                step.backward,
                work.flop,
                work.size_bytes,
            )
        )
        self.end_moment(moment, end_s)
        return True

    def _pass(self, lane: Lane, ready_s: float, duration_s: float) -> float:
        """Run a kernel before those of streams without priority; returns its start."""
        compute = lane.compute
        busy_until_s = compute.busy_until_s
        start_s = compute.place_first(ready_s, duration_s)
        if compute.busy_until_s > busy_until_s:
            for other in self.lanes:
                if other.compute is not compute or other.first or other.kernel is None:
                    continue
                last = self.events[other.kernel]
                if last.end_s == other.free_s == busy_until_s:
                    other.free_s = compute.busy_until_s
                    self.events[other.kernel] = last._replace(end_s=other.free_s)
        return start_s

    def _together(self, step: Together) -> int:
        thread = self.threads[step.thread]
        lanes = [self.lanes[stream] for stream in step.streams]
        thread.now_s += thread.launch_s * len(lanes)
        launch_s, moment = thread.now_s, self.begin_moment()

        def run() -> bool:
            duration_s = self.model.collective_time_s(step.name, step.size_bytes, len(lanes))
            start_s = max(launch_s, *(lane.free_s for lane in lanes))
            event = TraceEvent(
                name=step.name,
                kind="collective",
                device=HOST,
                stream=0,
                start_s=start_s,
                end_s=start_s + duration_s,
                launch_s=launch_s,
                module=step.module,
                backward=step.backward,
                size_bytes=step.size_bytes,
            )
            self._ran_on(lanes, event, moment)
            return True

        self.give(lanes, run)
        return moment

    def _copy(self, step: Copy) -> int:
        thread = self.threads[step.thread]
        source = None if step.source is None else self.lanes[step.source]
        target = None if step.target is None else self.lanes[step.target]
        lanes = [lane for lane in (source, target) if lane is not None]
        thread.now_s += thread.launch_s
        launch_s, moment = thread.now_s, self.begin_moment()

        def run() -> bool:
            among = self.model.copy_time_s if len(lanes) == 2 else self.model.host_copy_time_s
            duration_s = among(step.size_bytes)
            ready_s = max(launch_s, *(lane.free_s for lane in lanes))
            start_s = self._link(source, target).place(ready_s, duration_s)
            event = TraceEvent(
                name="copy",
                kind="copy",
                device=HOST,
                stream=0,
                start_s=start_s,
                end_s=start_s + duration_s,
                launch_s=launch_s,
                module=step.module,
                backward=step.backward,
                size_bytes=step.size_bytes,
                source=HOST if source is None else source.device,
                target=HOST if target is None else target.device,
            )
            self._ran_on(lanes, event, moment)
            return True

        self.give(lanes, run)
        return moment

    def _link(self, source: Lane | None, target: Lane | None) -> Unit:
        """The way from one device to another; copies in one direction take turns on it."""
        key = (
            -1 if source is None else source.device.index,
            -1 if target is None else target.device.index,
        )
        return self._links.setdefault(key, Unit())

    def _ran_on(self, lanes: Sequence[Lane], event: TraceEvent, moment: int) -> None:
        """Keep the event as the last one of each of the streams."""
        for lane in lanes:
            self.events.append(event._replace(device=lane.device, stream=lane.number))
            lane.free_s = event.end_s
        self.end_moment(moment, event.end_s)

    # Collectives

    def _collective(self, step: Collective) -> int:
        thread = self.threads[step.thread]
        thread.now_s += thread.launch_s
        moment = self.begin_moment()
        lane = self.lanes[step.stream]
        part = self.outstanding[moment] = Part(self, step, lane, thread.now_s, moment)
        self.give((lane,), lambda: part.has_ended or self._arrive(part))
        return moment

    def _arrive(self, part: Part) -> bool:
        if part.ready_s is None:
            part.ready_s = max(part.launch_s, part.lane.free_s)
            self._meeting.arrive(part)
        return part.has_ended

    def wires(self, part: Part) -> list[Unit]:
        """What a part of a collective occupies: the ways out of and into its GPU, or one of them."""
        return self._wires_of(part.lane.device.index, part.step.name, part.step.ranks)

    def _wires_of(self, gpu: int, name: str, ranks: Sequence[int]) -> list[Unit]:
        between = self._is_between_hosts(ranks)
        ways = {"send": ("out",), "recv": ("in",)}.get(name, ("out", "in"))
        return [self._wires.setdefault((gpu, between, way), Unit()) for way in ways]

    def ended(self, part: Part, start_s: float, end_s: float) -> None:
        """A part of a collective has its times."""
        step, lane = part.step, part.lane
        assert part.ready_s is not None
        event = TraceEvent(
            name=step.name,
            kind="collective",
            device=lane.device,
            stream=lane.number,
            start_s=start_s,
            end_s=end_s,
            launch_s=part.launch_s,
            module=step.module,
            backward=step.backward,
            size_bytes=step.size_bytes,
            ranks=step.ranks,
            link=self.model.link_name(step.ranks),
            ready_s=part.ready_s,
        )
        self._beside_kernels(lane.compute, step.name, step.ranks, start_s, end_s)
        part.has_ended = True
        del self.outstanding[part.moment]
        self._ran_on([lane], event, part.moment)

    def _beside_kernels(
        self, compute: Processors, name: str, ranks: Sequence[int], start_s: float, end_s: float
    ) -> None:
        """A collective takes multiprocessors from the kernels beside it."""
        if name not in ("send", "recv", "permute"):  # copy engines do those
            compute.begin_collective(start_s, end_s, self._is_between_hosts(ranks))

    def _is_between_hosts(self, ranks: Sequence[int]) -> bool:
        return len(self.model.hosts_of(ranks)) > 1
