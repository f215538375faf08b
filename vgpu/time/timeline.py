"""The result of a simulation: what ran where, and when. Figures and reports only read it."""

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from vgpu.time import kineto
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
            f"before it"
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
        Path(path).write_text(json.dumps(kineto.trace_of(self, rank)), encoding="utf-8")

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
