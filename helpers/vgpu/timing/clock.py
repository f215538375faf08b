"""Virtual time: when hosts, streams, events and copies of one recording do what.

The host needs a few microseconds to hand an operation over. The operation starts on its stream
when the host has handed it over, the stream is free and the events it waits for have happened. A
copy between GPUs occupies the current streams of both. A host that asks for a value waits.

Nothing here depends on real time or on how threads interleave: threads that share the interpreter
(DataParallel's) each get an equal share of it, by arithmetic instead of by turns.

Streams, threads of the host and links are kept in ``lanes.py``; the clock moves them on.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from helpers.vgpu.device import gpus
from helpers.vgpu.device.gpus import VirtualGPU
from helpers.vgpu.timing.costs import CostModel
from helpers.vgpu.timing.lanes import Done, HostTime, Mark, StreamTime, Unit, learn
from helpers.vgpu.timing.trace import HOST, TraceEvent

# Kernels, copies and waits of the recording under way; None where nobody records.
active: "Clock | None" = None


class Clock:
    """The time of one recording. All times are seconds since it began."""

    def __init__(self, model: CostModel, current_stream: Callable[[int], int]) -> None:
        self.model = model
        self.events: list[TraceEvent] = []
        self._streams: dict[tuple[int, int], StreamTime] = {}
        self._compute: dict[int, Unit] = {}
        self._links: dict[tuple[int, int], Unit] = {}
        self.main = HostTime(0, 0.0)
        self._of_thread = threading.local()
        self._of_thread.host = self.main
        self._forked: list[HostTime] = []
        self._engines: dict[int, HostTime] = {}  # the autograd engine's thread of each GPU
        self._host_known: dict[StreamTime, int] = {}
        self._marks: dict[int, Mark] = {}
        self._fork: HostTime | None = None
        self.several_streams = False  # whether a GPU has had more than its default stream
        self._current_stream = current_stream  # its number, for the index of a GPU
        self._backward_streams: set[StreamTime] = set()

    # Hosts

    def host(self) -> HostTime:
        """The calling thread's time. A thread that is new here starts where its parent is."""
        if self._engines and torch._C._current_graph_task_id() == -1:
            self._join_engines()
        host = getattr(self._of_thread, "host", None)
        if host is None:
            parent = self._fork or self.main
            host = HostTime(gpus.current_index() + 1, parent.now_s, parent.sharers)
            self._of_thread.host = host
            self._forked.append(host)
        return host

    def engine(self, gpu: VirtualGPU) -> HostTime:
        """The thread of the autograd engine that launches the backward pass on ``gpu``.

        torch has one a device, in C++, where no interpreter lock holds them apart.
        """
        engine = self._engines.get(gpu.index)
        if engine is None:
            host = getattr(self._of_thread, "host", self.main)
            engine = self._engines[gpu.index] = HostTime(host.number, host.now_s)
        return engine

    def _join_engines(self) -> None:
        """``backward()`` has returned: its caller waited until all was handed over."""
        ended_s = max(engine.now_s for engine in self._engines.values())
        self._engines.clear()
        host = self.host()
        host.now_s = max(host.now_s, ended_s)
        # The engine makes the caller's streams wait for those on which gradients came.
        for stream in sorted(self._backward_streams, key=lambda s: (s.device.index, s.number)):
            index = stream.device.index
            current = self._streams.get((index, self._current_stream(index)))
            if current is not None and current is not stream:
                self.wait_stream(current, stream)
        self._backward_streams.clear()

    def fork(self, sharers: int) -> None:
        """Threads seen from now on start at the caller's time and share one interpreter."""
        self._fork = HostTime(0, self.host().now_s, sharers)

    def join(self) -> None:
        """The caller goes on when all the threads of ``fork`` have ended."""
        self._fork = None
        host = self.host()
        host.now_s = max([host.now_s, *(forked.now_s for forked in self._forked)])
        self._forked.clear()

    def spend(self, duration_s: float) -> None:
        """The host computes something itself for so long."""
        if duration_s < 0:
            raise ValueError(f"duration_s must not be negative, got {duration_s}")
        self.host().now_s += duration_s

    # Streams and events

    def stream(self, gpu: VirtualGPU, number: int) -> StreamTime:
        key = (gpu.index, number)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = StreamTime(self, gpu.device, number)
            self.several_streams = self.several_streams or number != 0
        return stream

    def record_event(self, event: torch.Event, stream: StreamTime) -> float:
        """Let ``event`` mark the stream's end so far; returns its time."""
        ready_s = max(stream.free_s, self.host().now_s)
        self._marks[id(event)] = Mark(event, stream, ready_s, stream.count, dict(stream.known))
        return ready_s

    def wait_event(self, stream: StreamTime, event: torch.Event) -> None:
        """The stream's later work starts after the event; one never recorded holds up nothing."""
        mark = self._marks.get(id(event))
        if mark is not None:
            stream.free_s = max(stream.free_s, mark.time_s)
            stream.learn(mark.stream, mark.position, mark.known)

    def wait_for(self, stream: StreamTime, done: Done) -> None:
        """The stream's later work starts after one operation of another."""
        stream.free_s = max(stream.free_s, done.end_s)
        stream.learn(done.stream, done.position, {})

    def in_backward(self, stream: StreamTime) -> None:
        """The autograd engine gives work to the stream."""
        self._backward_streams.add(stream)

    def wait_stream(self, stream: StreamTime, other: StreamTime) -> None:
        stream.free_s = max(stream.free_s, other.free_s)
        stream.learn(other, other.count, other.known)

    def is_done(self, time_s: float) -> bool:
        """Whether what ends at ``time_s`` has ended for the calling thread."""
        return self.host().now_s >= time_s

    # Waits of the host

    def host_waits(self, streams: Iterable[StreamTime], name: str, host: HostTime) -> None:
        """The thread goes on when all work given to the streams has ended."""
        for stream in streams:
            self._wait_until(stream.free_s, name, host)
            learn(self._host_known, stream, stream.count, stream.known)

    def host_waits_for_event(self, event: torch.Event) -> None:
        mark = self._marks.get(id(event))
        if mark is not None:
            self._wait_until(mark.time_s, "synchronize", self.host())
            learn(self._host_known, mark.stream, mark.position, mark.known)

    def synchronize(self, gpu: VirtualGPU) -> None:
        """``torch.vgpu.synchronize``: wait for every stream of the GPU."""
        mine = [stream for stream in self._streams.values() if stream.device == gpu.device]
        self.host_waits(mine, "synchronize", self.host())

    def _wait_until(self, time_s: float, name: str, host: HostTime) -> None:
        if time_s > host.now_s:
            start_s = host.now_s
            host.now_s = time_s
            self.events.append(
                TraceEvent(name, "wait", HOST, host.number, start_s, time_s, start_s)
            )

    # Work

    def ready_s(self, stream: StreamTime, host: HostTime, launch_s: float) -> float:
        """When the next operation could start on the stream at the earliest."""
        return max(host.now_s + launch_s * host.sharers, stream.free_s)

    def kernel(
        self,
        name: str,
        gpu: VirtualGPU,
        stream: StreamTime,
        host: HostTime,
        launch_s: float,
        duration_s: float,
        flop: int,
        size_bytes: int,
    ) -> Done:
        """Hand one operation over."""
        host.now_s += launch_s * host.sharers
        ready_s = host.now_s if host.now_s > stream.free_s else stream.free_s
        unit = self._compute.get(gpu.index)
        if unit is None:
            unit = self._compute[gpu.index] = Unit()
        start_s = unit.place(ready_s, duration_s)
        stream.free_s = end_s = start_s + duration_s
        stream.count += 1
        self.events.append(
            TraceEvent(
                name,
                "kernel",
                gpu.device,
                stream.number,
                start_s,
                end_s,
                host.now_s,
                host.module,
                host.backward,
                flop,
                size_bytes,
            )
        )
        return Done(stream, stream.count, end_s, name)

    def collective(
        self,
        name: str,
        streams: Sequence[StreamTime],
        host: HostTime,
        launch_s: float,
        duration_s: float,
        size_bytes: int,
    ) -> None:
        """Hand the GPUs' parts of a collective over: these streams are busy, kernels are not.

        It starts when all of them are free, and their later work comes after it.
        """
        host.now_s += launch_s * len(streams)
        start_s = max(host.now_s, *(stream.free_s for stream in streams))
        for stream in streams:
            stream.free_s = start_s + duration_s
            stream.count += 1
            self.events.append(
                TraceEvent(
                    name,
                    "collective",
                    stream.device,
                    stream.number,
                    start_s,
                    stream.free_s,
                    host.now_s,
                    host.module,
                    host.backward,
                    size_bytes=size_bytes,
                )
            )
        for stream in streams:
            for other in streams:
                if other is not stream:
                    stream.learn(other, other.count, other.known)

    def copy(
        self,
        source: StreamTime | None,
        target: StreamTime | None,
        host: HostTime,
        launch_s: float,
        size_bytes: int,
        blocking: bool,
    ) -> list[Done]:
        """Hand a copy over; None is the host's side.

        Between GPUs it starts when both streams are free and occupies both; their later work
        comes after it (``copy_kernel_cuda`` in Copy.cu does so with two events).
        """
        streams = [stream for stream in (source, target) if stream is not None]
        host.now_s += launch_s * host.sharers
        if source is not None and target is not None:
            duration_s = self.model.copy_time_s(size_bytes)
        else:
            duration_s = self.model.host_copy_time_s(size_bytes)
        ready_s = max(host.now_s, *(stream.free_s for stream in streams))
        start_s = self._link(source, target).place(ready_s, duration_s)
        end_s = start_s + duration_s
        for stream in streams:
            stream.free_s = end_s
            stream.count += 1
            self.events.append(
                TraceEvent(
                    "copy",
                    "copy",
                    stream.device,
                    stream.number,
                    start_s,
                    end_s,
                    host.now_s,
                    host.module,
                    host.backward,
                    0,
                    size_bytes,
                    HOST if source is None else source.device,
                    HOST if target is None else target.device,
                )
            )
        if source is not None and target is not None:
            source.learn(target, target.count, target.known)
            target.learn(source, source.count, source.known)
        if blocking:
            self.host_waits(streams, "copy", host)
        return [Done(stream, stream.count, end_s, "copy") for stream in streams]

    def _link(self, source: StreamTime | None, target: StreamTime | None) -> Unit:
        """The way from one device to another; copies in one direction share it in turn."""
        key = (
            -1 if source is None else source.device.index,
            -1 if target is None else target.device.index,
        )
        return self._links.setdefault(key, Unit())

    # Order

    def comes_after(self, stream: StreamTime, done: Done) -> bool:
        """Whether the next operation of ``stream`` is sure to start after ``done`` has ended."""
        if done.stream is stream:
            return True
        position = done.position
        if stream.known.get(done.stream, 0) >= position:
            return True
        return self._host_known.get(done.stream, 0) >= position

    def end(self) -> tuple[float, float]:
        """Seconds until the host had ended, and until everything had."""
        host_s = self.host().now_s
        return host_s, max([host_s, *(stream.free_s for stream in self._streams.values())])
