"""The steps of a recording, without any times: what virtual time is computed from.

A program is a list of steps. Threads, streams and moments are numbered in the order in which steps
begin them: ``Thread`` begins a thread of the host, ``Stream`` a stream, and each kernel, copy,
collective or mark a moment, which is when it ends. Nothing here depends on the GPU or the network,
so that the same program plays on others (player.py).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vgpu.time.costs import CostModel, Work


class Factors(NamedTuple):
    """What a matrix product multiplies, if the left one lies in memory row by row."""

    left: int | None  # the moment when it was written; None if that was before the recording
    left_bytes: int
    right_bytes: int


class Operands(NamedTuple):
    """What an operation reads; known where operations are fused."""

    writers: tuple[int, ...] = ()  # moments when it was written
    moves: bool = False  # whether the operation only puts it in another order
    factors: Factors | None = None


NOT_KNOWN = Operands()


class Thread(NamedTuple):
    """A thread of the host begins, at the time that another one has reached."""

    number: int  # under which its waits are drawn
    parent: int | None
    sharing: int  # how many share an interpreter; 0 for the autograd engine's, which is C++


class Join(NamedTuple):
    """A thread goes on when others have got as far."""

    thread: int
    others: tuple[int, ...]


class Spend(NamedTuple):
    """A thread computes something itself."""

    thread: int
    duration_s: float


class Stream(NamedTuple):
    """A stream of a GPU; its number 0 is the default one."""

    gpu: int
    number: int
    priority: int = 0  # below 0 its kernels pass those of others


class Kernel(NamedTuple):
    """A thread hands an operation to a stream."""

    name: str
    thread: int
    stream: int
    module: str
    backward: bool
    work: Work
    operands: Operands = NOT_KNOWN


class Copy(NamedTuple):
    """A thread hands a copy over; None is the host's side."""

    thread: int
    module: str
    backward: bool
    size_bytes: int
    source: int | None
    target: int | None
    operands: Operands = NOT_KNOWN


class Together(NamedTuple):
    """One thread hands over the parts of all GPUs in a collective of this process."""

    name: str
    thread: int
    streams: tuple[int, ...]
    module: str
    backward: bool
    size_bytes: int


class Collective(NamedTuple):
    """A thread hands over this rank's part of a collective of a process group, or a message."""

    name: str
    thread: int
    stream: int
    module: str
    backward: bool
    size_bytes: int
    ranks: tuple[int, ...]  # of a message: this rank, and the one at its other end
    group: str
    caller: int | None = None  # the stream that was current; the collective's own has waited for it
    operands: Operands = NOT_KNOWN


class Mark(NamedTuple):
    """What a stream has been given so far has ended, and a thread has got here if it is given."""

    stream: int
    thread: int | None = None


class Wait(NamedTuple):
    """What a stream is given from now on starts after a moment."""

    stream: int
    moment: int


class HostWait(NamedTuple):
    """A thread goes on after a moment."""

    thread: int
    moment: int
    name: str


class Ask(NamedTuple):
    """A thread asks whether a moment has come."""

    thread: int
    moment: int


Step = (
    Thread
    | Join
    | Spend
    | Stream
    | Kernel
    | Copy
    | Together
    | Collective
    | Mark
    | Wait
    | HostWait
    | Ask
)


@dataclass
class Program:
    """What one process did in a recording, and the model by which it was timed. Can be pickled."""

    model: CostModel
    rank: int
    gpu: int  # the index of the one that was current when it began
    gpus: int  # how many the process had
    steps: list[Step] = field(default_factory=list)
    # Races, each with the index of its GPU in place of the device: devices stay in their process.
    races: list[tuple[int, Any]] = field(default_factory=list)
    # Moments of operations that only move what they read, and whose results outlived the recording.
    kept: frozenset[int] = frozenset()
