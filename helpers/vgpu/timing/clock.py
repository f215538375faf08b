"""Virtual time: when the hosts, streams, events and copies of one recording do what.

The host needs a few microseconds to hand an operation over. The operation starts on its stream
when the host has handed it over, the stream is free, and the events it waits for have happened. A
copy between GPUs occupies the current streams of both. A host that asks for a value waits.

Nothing here depends on real time or on how threads interleave.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from helpers.vgpu.device.gpus import VirtualGPU
from helpers.vgpu.timing.costs import CostModel, Work
from helpers.vgpu.timing.lanes import (
    Done,
    Hosts,
    HostTime,
    Known,
    Mark,
    StreamTime,
    Unit,
    in_backward,
    learn,
)
from helpers.vgpu.timing.trace import HOST, TraceEvent


class Clock:
    """The time of one recording. All times are seconds since it began."""

    def __init__(self, model: CostModel, current_stream: Callable[[int], int]) -> None:
        """current_stream: for the index of a GPU, the number of the thread's current stream."""
        self.model = model
        self.events: list[TraceEvent] = []
        self.hosts = Hosts(model)
        self.several_streams = False  # whether a GPU has had more than its default stream
        self._current_stream = current_stream
        self._streams: dict[tuple[int, int], StreamTime] = {}
        self._compute: dict[int, Unit] = {}
        self._links: dict[tuple[int, int], Unit] = {}
        self._wires: dict[tuple[int, bool], Unit] = {}  # of a GPU: inside its host, and out of it
        self._marks: dict[int, Mark] = {}  # by the id of their event
        self._host_known: Known = {}
        self._backward_streams: set[StreamTime] = set()

    # Streams, threads and events

    def stream(self, gpu: VirtualGPU, number: int) -> StreamTime:
        """A stream of ``gpu``; 0 is the default one."""
        key = (gpu.index, number)
        stream = self._streams.get(key)
        if stream is None:
            compute = self._compute.setdefault(gpu.index, Unit())
            stream = self._streams[key] = StreamTime(self, gpu.device, number, compute)
            self.several_streams = self.several_streams or number != 0
        return stream

    def host(self) -> HostTime:
        """The calling thread."""
        if self.hosts.engines and not in_backward():
            self.hosts.join_engines()
            self._join_backward_streams()
        return self.hosts.current()

    def in_backward(self, stream: StreamTime) -> None:
        """The autograd engine gives work to the stream."""
        self._backward_streams.add(stream)

    def _join_backward_streams(self) -> None:
        """The engine makes the caller's streams wait for those on which gradients came."""
        for stream in sorted(self._backward_streams, key=lambda s: (s.device.index, s.number)):
            index = stream.device.index
            current = self._streams.get((index, self._current_stream(index)))
            if current is not None and current is not stream:
                current.wait_stream(stream)
        self._backward_streams.clear()

    def record_event(self, event: torch.Event, stream: StreamTime) -> float:
        """Let ``event`` mark what the stream has been given so far; returns its time."""
        ready_s = max(stream.free_s, self.host().now_s)
        self._marks[id(event)] = Mark(event, stream, ready_s, stream.count, dict(stream.known))
        return ready_s

    def wait_event(self, stream: StreamTime, event: torch.Event) -> None:
        """The stream's later work starts after the event; one never recorded holds up nothing."""
        mark = self._marks.get(id(event))
        if mark is not None:
            stream.wait_mark(mark)

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
        if duration_s < 0:
            raise ValueError(f"duration_s must not be negative, got {duration_s}")
        self.host().now_s += duration_s

    def is_done(self, time_s: float) -> bool:
        """Whether what ends at ``time_s`` has ended for the calling thread."""
        return self.host().now_s >= time_s

    def ask_stream(self, stream: StreamTime) -> bool:
        """Whether all work given to the stream has ended; then the host knows of it."""
        return self._ask(stream.free_s, stream, stream.count, stream.known)

    def ask_event(self, event: torch.Event) -> bool:
        mark = self._marks.get(id(event))
        return mark is None or self._ask(mark.time_s, mark.stream, mark.position, mark.known)

    def _ask(self, time_s: float, stream: StreamTime, count: int, known: Known) -> bool:
        done = self.is_done(time_s)
        if done:
            learn(self._host_known, stream, count, known)
        else:
            self.host().now_s += self.model.python_launch_s  # so that a loop that asks ends
        return done

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
        of_gpu = [stream for stream in self._streams.values() if stream.device == gpu.device]
        self.host_waits(of_gpu, "synchronize", self.host())

    def _wait_until(self, time_s: float, name: str, host: HostTime) -> None:
        if time_s > host.now_s:
            wait = TraceEvent(
                name=name,
                kind="wait",
                device=HOST,
                stream=host.number,
                start_s=host.now_s,
                end_s=time_s,
                launch_s=host.now_s,
            )
            self.events.append(wait)
            host.now_s = time_s

    # Work for GPUs

    def ready_s(self, stream: StreamTime, host: HostTime) -> float:
        """When the next operation could start on the stream at the earliest."""
        return max(host.now_s + host.launch_s, stream.free_s)

    def kernel(
        self, name: str, stream: StreamTime, host: HostTime, work: Work, duration_s: float
    ) -> Done:
        """Hand one operation over."""
        host.now_s += host.launch_s
        launch_s = host.now_s
        ready_s = launch_s if launch_s > stream.free_s else stream.free_s
        start_s = stream.compute.place(ready_s, duration_s)
        event = TraceEvent(
            name=name,
            kind="kernel",
            device=stream.device,
            stream=stream.number,
            start_s=start_s,
            end_s=start_s + duration_s,
            launch_s=launch_s,
            module=host.module,
            backward=host.backward,
            flop=work.flop,
            size_bytes=work.size_bytes,
        )
        return self._ran(event, stream)

    def collective(
        self,
        name: str,
        streams: Sequence[StreamTime],
        host: HostTime,
        size_bytes: int,
        duration_s: float,
    ) -> None:
        """Hand the GPUs' parts of a collective over: these streams are busy, kernels are not.

        It starts when all of them are free, and their later work comes after it.
        """
        host.now_s += host.launch_s * len(streams)
        start_s = max(host.now_s, *(stream.free_s for stream in streams))
        for stream in streams:
            self._ran(
                TraceEvent(
                    name=name,
                    kind="collective",
                    device=stream.device,
                    stream=stream.number,
                    start_s=start_s,
                    end_s=start_s + duration_s,
                    launch_s=host.now_s,
                    module=host.module,
                    backward=host.backward,
                    size_bytes=size_bytes,
                ),
                stream,
            )
        for stream in streams:
            for other in streams:
                if other is not stream:
                    stream.met(other)

    def joined(
        self,
        name: str,
        stream: StreamTime,
        host: HostTime,
        size_bytes: int,
        ranks: Sequence[int],
    ) -> Done:
        """Hand over this rank's part of a collective, on a stream of its group.

        Collectives take turns on a GPU's links, and on its host's adapters.
        """
        host.now_s += host.launch_s
        duration_s = self.model.group_time_s(name, size_bytes, ranks)
        between = len(self.model.hosts_of(ranks)) > 1
        wire = self._wires.setdefault((stream.device.index, between), Unit())
        start_s = wire.place(max(host.now_s, stream.free_s), duration_s)
        event = TraceEvent(
            name=name,
            kind="collective",
            device=stream.device,
            stream=stream.number,
            start_s=start_s,
            end_s=start_s + duration_s,
            launch_s=host.now_s,
            module=host.module,
            backward=host.backward,
            size_bytes=size_bytes,
            ranks=tuple(ranks),
            link=self.model.link_name(ranks),
        )
        return self._ran(event, stream)._replace(known=dict(stream.known))

    def copy(
        self,
        source: StreamTime | None,
        target: StreamTime | None,
        host: HostTime,
        size_bytes: int,
        blocking: bool,
    ) -> list[Done]:
        """Hand a copy over; None is the host's side.

        Between GPUs it starts when both streams are free and occupies both; their later work
        comes after it (``copy_kernel_cuda`` in Copy.cu does so with two events).
        """
        streams = [stream for stream in (source, target) if stream is not None]
        host.now_s += host.launch_s
        if len(streams) == 2:
            duration_s = self.model.copy_time_s(size_bytes)
        else:
            duration_s = self.model.host_copy_time_s(size_bytes)
        ready_s = max(host.now_s, *(stream.free_s for stream in streams))
        start_s = self._link(source, target).place(ready_s, duration_s)
        dones = [
            self._ran(
                TraceEvent(
                    name="copy",
                    kind="copy",
                    device=stream.device,
                    stream=stream.number,
                    start_s=start_s,
                    end_s=start_s + duration_s,
                    launch_s=host.now_s,
                    module=host.module,
                    backward=host.backward,
                    size_bytes=size_bytes,
                    source=HOST if source is None else source.device,
                    target=HOST if target is None else target.device,
                ),
                stream,
            )
            for stream in streams
        ]
        if source is not None and target is not None:
            source.met(target)
            target.met(source)
        if blocking:
            self.host_waits(streams, "copy", host)
        return dones

    def _ran(self, event: TraceEvent, stream: StreamTime) -> Done:
        """Keep the event as the stream's last."""
        self.events.append(event)
        stream.free_s = event.end_s
        stream.count += 1
        return Done(stream, stream.count, event.end_s, event.name, event.backward)

    def allocation(self, name: str, stream: StreamTime, backward: bool) -> Done:
        """Memory handed out on the stream: what came before there may still use it."""
        return Done(stream, stream.count, stream.free_s, name, backward)

    def _link(self, source: StreamTime | None, target: StreamTime | None) -> Unit:
        """The way from one device to another; copies in one direction take turns on it."""
        key = (
            -1 if source is None else source.device.index,
            -1 if target is None else target.device.index,
        )
        return self._links.setdefault(key, Unit())

    def end(self) -> tuple[float, float]:
        """Seconds until the host had ended, and until everything had."""
        host_s = self.host().now_s
        return host_s, max([host_s, *(stream.free_s for stream in self._streams.values())])
