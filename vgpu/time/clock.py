"""The virtual time of one recording, while it is made: each step is kept, and played at once.

Here stands who does a step and what is known of its order; what time it takes is the player's
business (play/player.py). Nothing here depends on real time or on how threads interleave.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.time.backward import BackwardPasses, in_backward
from vgpu.time.costs import CostModel, Work
from vgpu.time.lanes import Done, Hosts, HostTime, Known, Marked, StreamTime, learn
from vgpu.time.simulator import Player
from vgpu.time.steps import (
    Ask,
    Collective,
    Copy,
    HostWait,
    Join,
    Kernel,
    Mark,
    Operands,
    Spend,
    Step,
    Stream,
    Thread,
    Together,
    Wait,
)
from vgpu.time.validation import check_seconds


class Clock:
    """The time of one recording. All times are seconds since it began."""

    def __init__(
        self,
        model: CostModel,
        priority_of: Callable[[int], int],
        settle: Callable[[StreamTime], None],
        rank: int = 0,
    ) -> None:
        """priority_of: for the number of a stream, its priority.

        settle: launches what a stream has put off.
        """
        self.recording = object()  # what tells its streams from those of other recordings
        self.steps: list[Step] = []
        self.player = Player(model, rank)
        self._lock = threading.Lock()  # steps are numbered, and DataParallel has several threads
        self.hosts = Hosts(self._begin_thread, self._do)
        self.passes = BackwardPasses(self.hosts, self.stream, self.settle_and_wait)
        self.several_streams = False  # whether a GPU has had more than its default stream
        self.settle = settle
        self._priority_of = priority_of
        self._streams: dict[tuple[int, int], StreamTime] = {}
        self._marks: dict[int, Marked] = {}  # by the id of their event
        self._host_known: Known = {}

    def _do(self, step: Step) -> int | None:
        with self._lock:
            self.steps.append(step)
            return self.player.do(step)

    def _begin_thread(self, step: Thread) -> HostTime:
        with self._lock:
            self.steps.append(step)
            self.player.do(step)
            index = len(self.player.threads) - 1
        return HostTime(index, self.player.threads[index])

    # Streams, threads and events

    def stream(self, gpu: VirtualGPU, number: int) -> StreamTime:
        """A stream of ``gpu``; 0 is the default one."""
        self.passes.end_if_returned()
        key = (gpu.index, number)
        stream = self._streams.get(key)
        if stream is None:
            with self._lock:
                step = Stream(gpu.index, number, self._priority_of(number))
                self.steps.append(step)
                self.player.do(step)
                index = len(self.player.lanes) - 1
            lane = self.player.lanes[index]
            stream = self._streams[key] = StreamTime(self.recording, index, lane)
            self.several_streams = self.several_streams or number != 0
        return stream

    def streams_of(self, gpu: VirtualGPU) -> list[StreamTime]:
        """Those that have been given something in this recording."""
        return [stream for stream in self._streams.values() if stream.device == gpu.device]

    def host(self) -> HostTime:
        """The calling thread; in a backward pass, the engine's that runs the node."""
        if in_backward():
            self.passes.begin_if_new()
            return self.hosts.engine(gpus.current_index())
        self.passes.end_if_returned()
        return self.hosts.current()

    def follow(self, host: HostTime, other: HostTime) -> None:
        """A thread goes on when another has got as far."""
        self._do(Join(host.index, (other.index,)))

    def wait_stream(self, stream: StreamTime, other: StreamTime) -> None:
        """What comes later on ``stream`` starts after all that ``other`` has been given."""
        self._do(Wait(stream.index, self._moment(Mark(other.index))))
        learn(stream.known, other, other.count, other.known)

    def settle_and_wait(self, stream: StreamTime, other: StreamTime) -> None:
        """The same where either may have put something off."""
        self.settle(stream)
        self.settle(other)
        self.wait_stream(stream, other)

    def wait_done(self, stream: StreamTime, done: Done) -> None:
        """What comes later on ``stream`` starts after one operation of another stream."""
        self._do(Wait(stream.index, done.moment))
        stream.learn(done)

    def record_event(self, event: torch.Event, stream: StreamTime) -> float:
        """Let ``event`` mark what the stream has been given so far; returns its time."""
        moment = self._moment(Mark(stream.index, self.host().index))
        done = self._done(stream, moment, "event", False)._replace(known=dict(stream.known))
        self._marks[id(event)] = Marked(event, done)
        return done.end_s

    def wait_event(self, stream: StreamTime, event: torch.Event) -> None:
        """The stream's later work starts after the event; one never recorded holds up nothing."""
        mark = self._marks.get(id(event))
        if mark is not None:
            self.wait_done(stream, mark.done)

    def comes_after(self, stream: StreamTime, done: Done) -> bool:
        """Whether the next operation of ``stream`` is sure to start after ``done`` has ended."""
        return (
            done.stream is stream
            or stream.known.get(done.stream, 0) >= done.position
            or self._host_known.get(done.stream, 0) >= done.position
        )

    # The host works or waits

    def spend(self, duration_s: float) -> None:
        """The host computes something itself for so long."""
        check_seconds("duration_s", duration_s)
        self._do(Spend(self.host().index, duration_s))

    def ask_stream(self, stream: StreamTime) -> bool:
        """Whether all work given to the stream has ended; then the host knows of it."""
        moment = self._moment(Mark(stream.index))
        return self._ask(self._done(stream, moment, "query", False)._replace(known=stream.known))

    def ask_event(self, event: torch.Event) -> bool:
        mark = self._marks.get(id(event))
        return mark is None or self._ask(mark.done)

    def _ask(self, done: Done) -> bool:
        host = self.host()
        has_ended = host.now_s >= done.end_s
        self._do(Ask(host.index, done.moment))
        if has_ended:
            learn(self._host_known, done.stream, done.position, done.known or {})
        return has_ended

    def host_waits(self, streams: Iterable[StreamTime], name: str, host: HostTime) -> None:
        """The thread goes on when all work given to the streams has ended."""
        for stream in streams:
            self._do(HostWait(host.index, self._moment(Mark(stream.index)), name))
            learn(self._host_known, stream, stream.count, stream.known)

    def host_waits_for_event(self, event: torch.Event) -> None:
        mark = self._marks.get(id(event))
        if mark is not None:
            done = mark.done
            self._do(HostWait(self.host().index, done.moment, "synchronize"))
            learn(self._host_known, done.stream, done.position, done.known or {})

    # Work for GPUs

    def ready_s(self, stream: StreamTime, host: HostTime) -> float:
        """When the next operation could start on the stream at the earliest."""
        return max(host.now_s + host.launch_s, stream.free_s)

    def kernel(
        self, name: str, stream: StreamTime, host: HostTime, work: Work, operands: Operands
    ) -> Done:
        """Hand one operation over."""
        step = Kernel(
            name, host.index, stream.index, host.module, host.backward, work.settled(), operands
        )
        moment = self._moment(step)
        stream.count += 1
        return self._done(stream, moment, name, host.backward)

    def collective(
        self, name: str, streams: Sequence[StreamTime], host: HostTime, size_bytes: int
    ) -> None:
        """Hand the GPUs' parts of a collective over: these streams are busy, kernels are not.

        It starts when all of them are free, and their later work comes after it.
        """
        numbers = tuple(stream.index for stream in streams)
        self._do(Together(name, host.index, numbers, host.module, host.backward, size_bytes))
        self._met(streams)

    def joined(
        self,
        name: str,
        stream: StreamTime,
        host: HostTime,
        size_bytes: int,
        ranks: Sequence[int],
        group: str,
        caller: StreamTime,
        operands: Operands,
    ) -> Done:
        """Hand over this rank's part of a collective, on a stream of its group.

        caller: the stream that was current.

        Collectives take turns on a GPU's links, and on its host's adapters.
        """
        step = Collective(
            name,
            host.index,
            stream.index,
            host.module,
            host.backward,
            size_bytes,
            tuple(ranks),
            group,
            caller.index,
            operands,
        )
        moment = self._moment(step)
        stream.count += 1
        done = self._done(stream, moment, name, host.backward)
        return done._replace(known=dict(stream.known))

    def copy(
        self,
        source: StreamTime | None,
        target: StreamTime | None,
        host: HostTime,
        size_bytes: int,
        blocking: bool,
        operands: Operands,
    ) -> list[Done]:
        """Hand a copy over; None is the host's side.

        Between GPUs it starts when both streams are free and occupies both; their later work
        comes after it (``copy_kernel_cuda`` in Copy.cu does so with two events).
        """
        moment = self._moment(
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
        self._met(streams)
        dones = [self._done(stream, moment, "copy", host.backward) for stream in streams]
        if blocking:
            self.host_waits(streams, "copy", host)
        return dones

    def _met(self, streams: Sequence[StreamTime]) -> None:
        """They took part in one operation: what comes later on each starts after it."""
        for stream in streams:
            stream.count += 1
        for stream in streams:
            for other in streams:
                if other is not stream:
                    learn(stream.known, other, other.count, other.known)

    def allocation(self, name: str, stream: StreamTime, backward: bool) -> Done:
        """Memory handed out on the stream: what came before there may still use it."""
        return self._done(stream, self._moment(Mark(stream.index)), name, backward)

    def _moment(self, step: Step) -> int:
        moment = self._do(step)
        assert moment is not None
        return moment

    def _done(self, stream: StreamTime, moment: int, name: str, backward: bool) -> Done:
        return Done(stream, stream.count, moment, self.player.come(moment), name, backward)

    def end(self) -> tuple[float, float]:
        """Seconds until the host had ended, and until everything had."""
        self.host()
        return self.player.end()
