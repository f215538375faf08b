"""Writes a timeline as JSON in Kineto's format, as ``torch.profiler`` exports it.

The format is defined by Kineto's output_json.cpp and by the Chromium project's "Trace Event
Format". Tools identify rows by name: an NCCL kernel's name starts with ``nccl`` and contains
``Kernel``, a launch is named ``cudaLaunchKernel``, and a copy ``Memcpy DtoH``. Virtual rows have
such names, too.

Left out are shapes, stacks, streams' waits for events, and the multiprocessor resources that a
kernel uses. An operator takes as long as a launch does in the cost model, and launches its kernel
halfway through.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # timeline.py imports this file
    from vgpu.time.timeline import HostRange, Timeline, TraceEvent

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


def trace_of(timeline: "Timeline", rank: int | None) -> Row:
    """Return the contents of the file, for one rank or (if None) for all ranks; times are in µs."""
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

    def __init__(self, timeline: "Timeline") -> None:
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

    def _operator(self, event: "TraceEvent", launch: Row) -> Iterator[Row]:
        start_s = event.launch_s - event.launching_s
        name = f"c10d::{event.name}" if event.kind == "collective" else f"aten::{event.name}"
        arguments = {"External id": launch["args"]["External id"], "module": event.module}
        yield {**launch, **_span("cpu_op", name, start_s, event.launch_s), "args": arguments}
        yield launch
        yield {**_flow(launch, launch["ts"]), "ph": "s"}

    def _launch(self, event: "TraceEvent", position: int) -> Row:
        thread = 0 if self._are_joined else event.thread
        where = self._thread(position, thread, event.backward, event.device.index)
        name = {"copy": "cudaMemcpyAsync", "collective": "cudaLaunchKernelExC"}.get(event.kind)
        from_s = event.launch_s - event.launching_s * _LAUNCHED_FROM
        call = _span("cuda_runtime", name or "cudaLaunchKernel", from_s, event.launch_s)
        number = self._correlation
        return {**where, **call, "args": {"correlation": number, "External id": number}}

    def _wait(self, event: "TraceEvent") -> Row:
        position = event.stream if self._are_joined else 0
        thread = 0 if self._are_joined else event.stream
        where = self._thread(position, thread, False, 0)
        name = "cudaDeviceSynchronize"
        if event.name != "synchronize":  # an operator that needs a value
            name = "cudaStreamSynchronize"
        span = _span("cuda_runtime", name, event.start_s, event.end_s)
        return {**where, **span, "args": {"for": f"aten::{event.name}"}}

    def _range(self, each: "HostRange") -> Row:
        position = each.device.index if self._are_joined else 0
        thread = 0 if self._are_joined else each.thread
        where = self._thread(position, thread, each.backward, each.device.index)
        span = _span("user_annotation", each.name, each.start_s, each.end_s)
        return {**where, **span, "args": {}}

    # GPUs

    def _on_gpu(self, event: "TraceEvent", launch: Row) -> Iterator[Row]:
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

    def _collective(self, event: "TraceEvent", name: str) -> Row:
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
                yield {**where, **_name("thread_name", name=f"stream {number}")}
        for position, thread in sorted(self._threads):
            where = {"rank": position, "pid": _FIRST_HOST + timeline.ranks[position], "tid": thread}
            name = f"thread {thread}" if thread < _ENGINE else f"autograd, GPU {thread - _ENGINE}"
            yield {**where, **_name("thread_name", name=name)}

    def _process(self, position: int, pid: int, name: str, label: str, place: int) -> Iterator[Row]:
        where = {"rank": position, "pid": pid, "tid": 0}
        yield {**where, **_name("process_name", name=name)}
        yield {**where, **_name("process_labels", labels=label)}
        yield {**where, **_name("process_sort_index", sort_index=place)}


def _span(category: str, name: str, start_s: float, end_s: float) -> Row:
    start_us, end_us = _whole_ns(start_s), _whole_ns(end_s)
    times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
    return {"ph": "X", "cat": category, "name": name, **times}


def _whole_ns(time_s: float) -> float:
    """Convert to µs, in whole ns, as readers do.

    Rounding durations separately would make spans overlap.
    """
    return round(time_s * 1e9) / 1e3


def _flow(launch: Row, at_us: float) -> Row:
    """Return one end of an arrow from a launch to what it launched."""
    where = {"rank": launch["rank"], "pid": launch["pid"], "tid": launch["tid"]}
    number = launch["args"]["correlation"]
    return {**where, "ts": at_us, "cat": "ac2g", "name": "ac2g", "id": number}


def _name(what: str, **arguments: Any) -> Row:
    return {"ph": "M", "ts": 0, "name": what, "args": arguments}


def _memcpy(event: "TraceEvent") -> str:
    source, target = (end is not None and end.type != "cpu" for end in (event.source, event.target))
    if source and target:
        return "Memcpy PtoP (Device -> Device)"
    return "Memcpy DtoH (Device -> Pageable)" if source else "Memcpy HtoD (Pageable -> Device)"
