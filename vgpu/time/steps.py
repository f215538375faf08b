"""The steps of a recorded program, without times: the input to the simulation.

A program is a list of steps. Threads, streams and events are numbered in the order in which steps
create them: ``BeginThread`` creates a thread of the host, ``BeginStream`` a stream, and each
kernel, copy, collective, deferred operation or recorded event creates an event, which happens when
it has finished. Nothing here depends on the GPU or the network, so the same program can be
simulated on others (simulate.py). For compiled code, compiler_passes.py replaces steps with others.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vgpu.time.costs import CostModel
from vgpu.time.workloads import Workload


class Issuer(NamedTuple):
    """Who launches an operation."""

    thread: int
    module: str  # "layer1.0.conv1"; empty outside every module
    backward: bool  # whether the autograd engine launches it


class Factors(NamedTuple):
    """The operands of a matmul whose left operand is stored in row-major order."""

    left: int | None  # the event that wrote it; None if that was before the recording
    left_bytes: int
    right_bytes: int


class Operands(NamedTuple):
    """What an operation reads, which is only known if operations are fused."""

    writers: tuple[int, ...] = ()  # the events that wrote its inputs
    moves: bool = False  # whether the operation only reorders its input
    factors: Factors | None = None


UNKNOWN_OPERANDS = Operands()


class BeginThread(NamedTuple):
    """A thread of the host starts, at the current time of its parent."""

    number: int  # its row in a trace
    parent: int | None
    sharing: int  # how many threads share an interpreter; 0 for the autograd engine's C++ threads


class JoinThreads(NamedTuple):
    """A thread waits for the others."""

    thread: int
    others: tuple[int, ...]


class HostWork(NamedTuple):
    """A thread of the host is busy."""

    thread: int
    duration_s: float
    name: str = "host work"


class BeginRange(NamedTuple):
    """A thread enters a block of ``torch.profiler.record_function``."""

    thread: int
    name: str


class EndRange(NamedTuple):
    """A thread leaves the innermost block that it has entered."""

    thread: int


class BeginStream(NamedTuple):
    """A stream of a GPU; number 0 is the default stream."""

    gpu: int
    number: int
    priority: int = 0  # if negative, its kernels overtake those on other streams


class Kernel(NamedTuple):
    """An operation is launched on a stream."""

    name: str
    by: Issuer
    stream: int
    work: Workload
    operands: Operands = UNKNOWN_OPERANDS


class Copy(NamedTuple):
    """A copy is launched; its source or target is None if it's on the host."""

    by: Issuer
    size_bytes: int
    source: int | None
    target: int | None
    operands: Operands = UNKNOWN_OPERANDS

    @property
    def name(self) -> str:
        return "copy"


class LocalCollective(NamedTuple):
    """One thread launches a collective among multiple GPUs of its process."""

    name: str
    by: Issuer
    streams: tuple[int, ...]
    size_bytes: int


class Elements(NamedTuple):
    """What a rank passes to a collective and gets from it, as counted by Kineto."""

    dtype: str = ""  # as in C++: "BFloat16"
    sent: int = 0
    received: int = 0


class GroupCollective(NamedTuple):
    """This rank's side of a process group's collective, or of a message, is launched."""

    name: str
    by: Issuer
    stream: int
    size_bytes: int
    ranks: tuple[int, ...]  # for a message: this rank and its peer
    group: str
    issued_on: int  # the current stream, for which the group's stream waits
    operands: Operands = UNKNOWN_OPERANDS
    elements: Elements = Elements()

    @property
    def is_message(self) -> bool:
        return self.name in ("send", "recv")


class RecordEvent(NamedTuple):
    """An event that happens once everything enqueued on a stream has finished.

    If ``thread`` isn't None, the event doesn't happen before that thread reaches this step.
    """

    stream: int
    thread: int | None = None


class WaitEvent(NamedTuple):
    """Work enqueued on a stream from now on starts after an event."""

    stream: int
    event: int


class HostWait(NamedTuple):
    """A thread waits for an event."""

    thread: int
    event: int
    name: str


class QueryEvent(NamedTuple):
    """A thread asks whether an event has happened."""

    thread: int
    event: int


# If elementwise operations are fused, there are four more kinds of steps, which a pass replaces.


class Read(NamedTuple):
    """A tensor on a GPU that a deferred operation reads."""

    writer: int | None  # the event that wrote it; None if that was before the recording
    block: int  # identifies its block of memory
    offset: int  # in elements
    size_bytes: int


class Deferred(NamedTuple):
    """An elementwise operation or a reduction, to be launched in one kernel with its neighbors."""

    name: str
    by: Issuer
    stream: int
    reads: tuple[Read, ...]
    written_bytes: int


class NeedResults(NamedTuple):
    """The results of deferred operations are needed in memory."""

    events: tuple[int, ...]
    by: Issuer


class GraphBreak(NamedTuple):
    """A compiled program ends: what's deferred on ``stream``, or on all if None, is launched."""

    stream: int | None
    by: Issuer


class Release(NamedTuple):
    """The result of a deferred operation has been freed or overwritten."""

    event: int


EventStep = Kernel | Copy | LocalCollective | GroupCollective | RecordEvent | Deferred
"""The steps that create an event."""

ProgramStep = (
    EventStep
    | BeginThread
    | JoinThreads
    | HostWork
    | BeginRange
    | EndRange
    | BeginStream
    | WaitEvent
    | HostWait
    | QueryEvent
    | NeedResults
    | GraphBreak
    | Release
)


@dataclass
class Program:
    """What one process did in a recording, and its cost model. Can be pickled."""

    costs: CostModel
    rank: int
    gpu: int  # the index of the current GPU when the recording started
    gpus: int  # how many GPUs the process had
    steps: list[ProgramStep] = field(default_factory=list)
    # Each race with the index of its GPU, which replaces its device: devices can't leave a process.
    races: list[tuple[int, Any]] = field(default_factory=list)
    # Events of operations that only reorder their input and whose results outlive the recording.
    kept: frozenset[int] = frozenset()
