"""The result of a simulation: what ran where and when, also as a trace."""

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vgpu.time.steps import Elements, Program

HOST = torch.device("cpu")


class TraceEvent(NamedTuple):
    """One kernel, one side of a copy or collective, or one wait of the host.

    Times are seconds since the recording began.
    """

    name: str  # PyTorch's name for the operation, such as "convolution" or "copy"
    kind: str  # "kernel", "copy", "collective" or "wait"
    device: torch.device  # where it ran; the CPU for a wait
    stream: int  # 0 is the default stream; for a wait, the host's thread
    start_s: float
    end_s: float
    launch_s: float  # when the host finished launching it
    module: str = ""  # "layer1.0.conv1"; empty outside every module
    backward: bool = False  # whether the autograd engine launched it
    flop: int = 0
    size_bytes: int = 0  # what it reads and writes; for a copy, what it moves
    source: torch.device | None = None  # of a copy
    target: torch.device | None = None
    # For a process group's collective: its ranks, the link or network it uses, when this rank was
    # ready (the collective starts when all ranks are), and the group.
    ranks: tuple[int, ...] = ()
    link: str = ""
    ready_s: float | None = None
    group: str = ""
    elements: Elements = Elements()
    thread: int = 0  # the host thread that launched it
    launching_s: float = 0.0  # how long the launch took

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def waited_s(self) -> float:
        """The time that a collective of a process group waited for other ranks, or for its link."""
        return 0.0 if self.ready_s is None else self.start_s - self.ready_s

    @property
    def label(self) -> str:
        """The module, or the operation if it's outside every module."""
        return (self.module or self.name) + (" (backward)" if self.backward else "")


class HostRange(NamedTuple):
    """A time range on one host thread: a block of ``record_function``, or ``vgpu.spend``."""

    name: str
    kind: str  # "range" or "work"
    device: torch.device  # the current GPU of its rank
    thread: int
    backward: bool  # whether it's a thread of the autograd engine
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Race:
    """An operation used memory that another stream had written or read, without waiting for it."""

    operation: str
    device: torch.device
    stream: int
    other_operation: str
    other_stream: int
    module: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return (
            f"{self.operation}{where} on stream {self.stream} of {self.device} does not wait for "
            f"{self.other_operation} on stream {self.other_stream}: call wait_stream or wait_event "
            f"before {self.operation}"
        )


@dataclass(frozen=True)
class FreedInUse(Race):
    """Memory of ``operation`` is freed while another stream may still use it.

    The caching allocator reuses the memory on ``stream``, where it was allocated, and only knows
    about other streams from ``record_stream``.
    """

    def __str__(self) -> str:
        return (
            f"memory of {self.operation} on stream {self.stream} of {self.device} is freed while "
            f"{self.other_operation} on stream {self.other_stream} may still use it: call "
            f"tensor.record_stream with stream {self.other_stream}, or make stream {self.stream} "
            f"wait for that stream, before the tensor is freed"
        )


@dataclass
class Timeline:
    """What ``record()`` recorded; complete at the end of its block."""

    gpu: str  # the GPU model whose datasheet determined the times
    devices: list[torch.device]
    events: list[TraceEvent] = field(default_factory=list)  # sorted by start, device and stream
    races: list[Race] = field(default_factory=list)
    makespan_s: float = 0.0  # until host, kernels and copies have all finished
    host_s: float = 0.0  # until the host has finished; what a timer without synchronize measures
    # For joined ranks, the rank of each device; for a single rank, just that rank.
    ranks: list[int] = field(default_factory=lambda: [0])
    programs: tuple[Program, ...] = field(default=(), repr=False)  # what replay() simulates again
    host_ranges: list[HostRange] = field(default_factory=list)  # sorted by end on each thread

    def busy_s(self, device: torch.device | str) -> float:
        """Return the seconds in which at least one kernel ran on ``device``; copies don't count."""
        return covered_s(e for e in self.of(device) if e.kind == "kernel")

    def copying_s(self, device: torch.device | str) -> float:
        """Return the seconds in which ``device`` sent or received data in copies or collectives."""
        return covered_s(e for e in self.of(device) if e.kind in ("copy", "collective"))

    def utilization(self, device: torch.device | str) -> float:
        """Return the fraction of the makespan during which ``device`` computed."""
        return self.busy_s(device) / self.makespan_s if self.makespan_s else 0.0

    def of(self, device: torch.device | str) -> list[TraceEvent]:
        """Return the events of one device, in order of their start."""
        wanted = torch.device(device)
        return [event for event in self.events if event.device == wanted]

    def streams(self, device: torch.device | str) -> list[int]:
        """Return the streams of a device that were used."""
        return sorted({event.stream for event in self.of(device)})

    @property
    def flop(self) -> int:
        return sum(event.flop for event in self.events)

    def to_chrome_trace(self, path: str | Path, rank: int | None = None) -> None:
        """Write JSON in the format of ``torch.profiler`` (Kineto's), with virtual times.

        https://ui.perfetto.dev opens it, and so does Holistic Trace Analysis, which expects one
        file per rank. ``rank`` is the rank to write; by default, all of them are written. Raises
        ValueError for a rank that isn't in the timeline.
        """
        if rank is not None and rank not in self.ranks:
            raise ValueError(
                f"rank must be one of the ranks in this timeline, {self.ranks}, got {rank!r}"
            )
        Path(path).write_text(json.dumps(trace_of(self, rank)), encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"virtual time, {self.gpu}: {self.makespan_s * 1e3:.3f} ms"]
        for device in self.devices:
            lines.append(
                f"  {device}: computes {self.busy_s(device) * 1e3:.3f} ms "
                f"({self.utilization(device):.0%}), copies {self.copying_s(device) * 1e3:.3f} ms"
            )
        return "\n".join([*lines, *(f"  race: {race}" for race in self.races)])


def in_order(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Sort events by start, device and stream."""
    return sorted(events, key=lambda e: (e.start_s, _name(e.device), e.stream, e.launch_s))


_name = functools.cache(str)  # of a device; cached because there are many events


def covered_s(events: Iterable[TraceEvent]) -> float:
    """Return the length of the union of the events' intervals."""
    return union_s((event.start_s, event.end_s) for event in events)


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each of which is (start, end)."""
    total_s, until_s = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        if end_s > until_s:
            total_s += end_s - max(start_s, until_s)
            until_s = end_s
    return total_s


# A timeline as JSON in Kineto's format, as ``torch.profiler`` exports it
#
# The format is defined by Kineto's output_json.cpp and by the Chromium project's "Trace Event
# Format". Tools identify rows by name: an NCCL kernel's name starts with ``nccl`` and contains
# ``Kernel``, a launch is named ``cudaLaunchKernel``, and a copy ``Memcpy DtoH``. Virtual rows have
# such names, too.
#
# Left out are shapes, stacks, streams' waits for events, and the multiprocessor resources that a
# kernel uses. An operator takes as long as a launch does in the cost model, and launches its kernel
# halfway through.


Row = dict[str, Any]

KINETO_DTYPES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}

_DEFAULT_STREAM = 7  # CUPTI's number for the default stream
_FIRST_HOST = 1000  # rank 0's process; lower numbers are GPUs
_ENGINE = 100  # the autograd engine's thread for vgpu:0
_LAUNCHED_FROM = 0.5  # the fraction of an operator's time before its launch begins

# For each collective in torch.distributed: NCCL's kernel, and the collective's name in
# ProcessGroupNCCL.
_COLLECTIVES = {
    "all_reduce": ("AllReduce", "allreduce"),
    "all_gather": ("AllGather", "_allgather_base"),
    "reduce_scatter": ("ReduceScatter", "_reduce_scatter_base"),
    "all_to_all": ("SendRecv", "all_to_allv"),
    "broadcast": ("Broadcast", "broadcast"),
    "reduce": ("Reduce", "reduce"),
    "gather": ("SendRecv", "gather"),
    "scatter": ("SendRecv", "scatter"),
    "send": ("SendRecv", "send"),
    "recv": ("SendRecv", "recv"),
}


def trace_of(timeline: Timeline, rank: int | None) -> Row:
    """Return the file's contents, for one rank or (if None) for all ranks; times are in µs."""
    position = None if rank is None else timeline.ranks.index(rank)
    writer = _Writer(timeline)
    rows = [
        {name: value for name, value in row.items() if name != "rank"}
        for row in writer.rows()
        if position is None or row["rank"] == position
    ]
    taking_part = [r for event in timeline.events for r in event.ranks]
    distributed = {
        "backend": "nccl",
        "rank": timeline.ranks[position or 0],
        "world_size": max([*timeline.ranks, *taking_part]) + 1,
    }
    return {
        "schemaVersion": 1,
        "deviceProperties": writer.device_properties(),
        "distributedInfo": distributed,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": rows,
    }


class _Writer:
    """Creates the rows of a timeline, each with its rank's position, which ``trace_of`` removes."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._are_joined = len(timeline.ranks) > 1
        self._correlation = 0
        self._threads: set[tuple[int, int]] = set()  # each with its rank's position

    def device_properties(self) -> list[Row]:
        timeline = self._timeline
        if not timeline.programs:
            return [{"id": device.index, "name": timeline.gpu} for device in timeline.devices]
        spec = timeline.programs[0].costs.spec
        return [
            {
                "id": device.index,
                "name": spec.name,
                "totalGlobalMem": spec.memory_bytes,
                "numSms": spec.multi_processor_count,
            }
            for device in timeline.devices
        ]

    def rows(self) -> Iterator[Row]:
        launched: dict[tuple[Any, ...], Row] = {}  # both sides of a copy share one launch
        for event in self._timeline.events:
            if event.kind == "wait":
                yield self._wait(event)
                continue
            position = event.device.index if self._are_joined else 0
            call = (position, event.thread, event.launch_s, event.name)
            if call not in launched:
                self._correlation += 1
                launched[call] = self._launch(event, position)
                yield from self._operator(event, launched[call])
            yield from self._on_gpu(event, launched[call])
        for each in self._timeline.host_ranges:
            yield self._range(each)
        yield from self._names()

    # The host

    def _thread(self, position: int, number: int, backward: bool, gpu: int) -> Row:
        """Return a host row's process and thread: if ``backward``, the engine thread of ``gpu``."""
        thread = _ENGINE + gpu if backward else number
        self._threads.add((position, thread))
        return {
            "rank": position,
            "pid": _FIRST_HOST + self._timeline.ranks[position],
            "tid": thread,
        }

    def _operator(self, event: TraceEvent, launch: Row) -> Iterator[Row]:
        start_s = event.launch_s - event.launching_s
        name = f"c10d::{event.name}" if event.kind == "collective" else f"aten::{event.name}"
        arguments = {"External id": launch["args"]["External id"], "module": event.module}
        yield {**launch, **_span("cpu_op", name, start_s, event.launch_s), "args": arguments}
        yield launch
        yield {**_flow(launch, launch["ts"]), "ph": "s"}

    def _launch(self, event: TraceEvent, position: int) -> Row:
        thread = 0 if self._are_joined else event.thread
        where = self._thread(position, thread, event.backward, event.device.index)
        name = {"copy": "cudaMemcpyAsync", "collective": "cudaLaunchKernelExC"}.get(event.kind)
        from_s = event.launch_s - event.launching_s * _LAUNCHED_FROM
        call = _span("cuda_runtime", name or "cudaLaunchKernel", from_s, event.launch_s)
        number = self._correlation
        return {**where, **call, "args": {"correlation": number, "External id": number}}

    def _wait(self, event: TraceEvent) -> Row:
        position = event.stream if self._are_joined else 0
        thread = 0 if self._are_joined else event.stream
        where = self._thread(position, thread, False, 0)
        name = "cudaDeviceSynchronize"
        if event.name != "synchronize":  # an operator that needs a value
            name = "cudaStreamSynchronize"
        span = _span("cuda_runtime", name, event.start_s, event.end_s)
        return {**where, **span, "args": {"for": f"aten::{event.name}"}}

    def _range(self, each: HostRange) -> Row:
        position = each.device.index if self._are_joined else 0
        thread = 0 if self._are_joined else each.thread
        where = self._thread(position, thread, each.backward, each.device.index)
        span = _span("user_annotation", each.name, each.start_s, each.end_s)
        return {**where, **span, "args": {}}

    # GPUs

    def _on_gpu(self, event: TraceEvent, launch: Row) -> Iterator[Row]:
        stream = _DEFAULT_STREAM + event.stream
        arguments = {**launch["args"], "device": event.device.index, "stream": stream}
        arguments |= {"module": event.module, "bytes": event.size_bytes}
        kind, name = "kernel", event.name
        if event.kind == "copy":
            kind, name = "gpu_memcpy", _memcpy(event)
            bandwidth = event.size_bytes / event.duration_s / 1e9 if event.duration_s else 0.0
            arguments["memory bandwidth (GB/s)"] = bandwidth
        elif event.kind == "collective":
            kernel, collective = _COLLECTIVES.get(event.name, (event.name, event.name))
            name = f"ncclDevKernel_{kernel}"
            arguments |= self._collective(event, collective)
        else:
            arguments["FLOP"] = event.flop
        where = {"rank": launch["rank"], "pid": event.device.index, "tid": stream}
        # An NCCL kernel starts when its own rank is ready, and then waits for the other ranks.
        start_s = event.start_s if event.ready_s is None else event.ready_s
        yield {**where, **_span(kind, name, start_s, event.end_s), "args": arguments}
        at_us = _whole_ns(start_s)
        yield {**_flow(launch, at_us), **where, "ph": "f", "bp": "e"}

    def _collective(self, event: TraceEvent, name: str) -> Row:
        group = {
            "Process Group Name": event.group,
            "Process Group Ranks": str(list(event.ranks)),
            "Group size": len(event.ranks) or len(self._timeline.devices),
        }
        elements = event.elements
        sizes = {"In msg nelems": elements.sent, "Out msg nelems": elements.received}
        return {"Collective name": name, **sizes, "dtype": elements.dtype, **group}

    # Names of processes and threads

    def _names(self) -> Iterator[Row]:
        timeline = self._timeline
        for position, rank in enumerate(timeline.ranks):
            yield from self._process(position, _FIRST_HOST + rank, f"rank {rank}", "CPU", 2 * rank)
        for device in (each for each in timeline.devices if timeline.streams(each)):
            position = device.index if self._are_joined else 0
            rank, gpu = timeline.ranks[position], f"GPU {device.index}"
            name = (
                f"rank {rank}, {timeline.gpu}" if self._are_joined else f"{device}, {timeline.gpu}"
            )
            yield from self._process(position, device.index, name, gpu, 2 * rank + 1)
            for stream in timeline.streams(device):
                number = _DEFAULT_STREAM + stream
                where = {"rank": position, "pid": device.index, "tid": number}
                yield {**where, **_metadata("thread_name", name=f"stream {number}")}
        for position, thread in sorted(self._threads):
            where = {"rank": position, "pid": _FIRST_HOST + timeline.ranks[position], "tid": thread}
            name = f"thread {thread}" if thread < _ENGINE else f"autograd, GPU {thread - _ENGINE}"
            yield {**where, **_metadata("thread_name", name=name)}

    def _process(self, position: int, pid: int, name: str, label: str, place: int) -> Iterator[Row]:
        where = {"rank": position, "pid": pid, "tid": 0}
        yield {**where, **_metadata("process_name", name=name)}
        yield {**where, **_metadata("process_labels", labels=label)}
        yield {**where, **_metadata("process_sort_index", sort_index=place)}


def _span(category: str, name: str, start_s: float, end_s: float) -> Row:
    start_us, end_us = _whole_ns(start_s), _whole_ns(end_s)
    times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
    return {"ph": "X", "cat": category, "name": name, **times}


def _whole_ns(time_s: float) -> float:
    """Convert to µs, rounded to whole ns, as readers do.

    Rounding durations separately would make spans overlap.
    """
    return round(time_s * 1e9) / 1e3


def _flow(launch: Row, at_us: float) -> Row:
    """Return one end of an arrow from a launch to what it launched."""
    where = {"rank": launch["rank"], "pid": launch["pid"], "tid": launch["tid"]}
    number = launch["args"]["correlation"]
    return {**where, "ts": at_us, "cat": "ac2g", "name": "ac2g", "id": number}


def _metadata(what: str, **arguments: Any) -> Row:
    return {"ph": "M", "ts": 0, "name": what, "args": arguments}


def _memcpy(event: TraceEvent) -> str:
    source, target = (end is not None and end.type != "cpu" for end in (event.source, event.target))
    if source and target:
        return "Memcpy PtoP (Device -> Device)"
    return "Memcpy DtoH (Device -> Pageable)" if source else "Memcpy HtoD (Pageable -> Device)"
