"""A pass over steps that fuses elementwise operations as ``torch.compile`` does.

An elementwise operation or a reduction is deferred until something else needs its result: a matrix
product, a collective, another stream, or the host; or until its own stream waits for another, since
compiled code ends there. Then one kernel reads what the chain began with and writes the result.
Whatever else needs an intermediate result computes it again from the same beginnings, as
torch.compile's partitioner has it between forward and backward pass; one that is never needed
outside its chain is never written. The source of the limit on a chain's length is TorchInductor
(torch/_inductor/config.py, ``realize_acc_reads_threshold``).

Left out: what a compiled program saves of memory; templates that fuse into matrix products; CUDA
graphs; kernels that are faster or slower than the ones they replace.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vgpu.time.costs import FLOAT32, Workload
from vgpu.time.steps import (
    BEGIN_EVENTS,
    Copy,
    Deferred,
    GraphBreak,
    GroupCollective,
    HostWait,
    Kernel,
    NeedResults,
    Operands,
    ProgramStep,
    QueryEvent,
    Read,
    RecordEvent,
    Release,
    WaitEvent,
)

# A chain that begins with more tensors than these has its inputs written first.
_MOST_READS = 8

# Operations that only reorder what they read; a copy may change the type, and its size tells.
_MOVES = {"cat", "clone", "copy"}

# What a chain begins with: bytes, and the event that wrote them, by who wrote them (or by their
# block, where that was before the recording) and where in a block they are.
_Reads = dict[tuple[bool, int, int], tuple[int, int | None]]


class _Chain(NamedTuple):
    """What launching one deferred operation takes."""

    stream: int
    reads: _Reads
    written_bytes: int
    moves: bool


class Fusion:
    """The pass. It may be given the steps of a program in several parts, one after the other."""

    def __init__(self) -> None:
        self.number_of: list[int] = []
        """By the number of an event before the pass: the number after it."""
        self._fused: list[ProgramStep] = []
        self._events = 0
        self._chains: dict[int, _Chain] = {}  # not launched, and not released
        self._moved: dict[int, int] = {}  # of results that live: by their event, the kernel's

    def steps(self, steps: Iterable[ProgramStep]) -> list[ProgramStep]:
        """The next steps of the program, with fused kernels in place of deferred operations."""
        self._fused = []
        for step in steps:
            if isinstance(step, Deferred):
                self._defer(step)
            elif isinstance(step, NeedResults):
                self._launch_each(step.events, step)
            elif isinstance(step, GraphBreak):
                self._launch_all(step)
            elif isinstance(step, Release):
                self._chains.pop(step.event, None)
                self._moved.pop(step.event, None)
            elif isinstance(step, WaitEvent | HostWait | QueryEvent):
                self._fused.append(step._replace(event=self.number_of[step.event]))
            elif isinstance(step, BEGIN_EVENTS):
                if isinstance(step, Kernel | Copy | GroupCollective):
                    step = step._replace(operands=self._renumbered(step.operands))
                self.number_of.append(self._begin(step))
            else:
                self._fused.append(step)
        return self._fused

    @property
    def kept(self) -> frozenset[int]:
        """``Program.kept``, once all steps have been given."""
        return frozenset(self._moved.values())

    def _defer(self, step: Deferred) -> None:
        moves = step.name in _MOVES and all(
            self._chains[read.writer].moves for read in step.reads if read.writer in self._chains
        )
        reads = self._beginnings(step.reads)
        if len(reads) > _MOST_READS:
            self._launch_each([read.writer for read in step.reads], step)
            reads = self._beginnings(step.reads)
        self._chains[len(self.number_of)] = _Chain(step.stream, reads, step.written_bytes, moves)
        self.number_of.append(self._begin(RecordEvent(step.stream)))

    def _beginnings(self, reads: Iterable[Read]) -> _Reads:
        """What a chain that reads these begins with."""
        beginnings: _Reads = {}
        for read in reads:
            writer = read.writer
            if writer is not None and writer in self._chains:
                beginnings |= self._chains[writer].reads
                continue
            source = read.block if writer is None else writer
            key = (writer is None, source, read.offset)
            size_bytes = max(read.size_bytes, beginnings.get(key, (0, None))[0])
            beginnings[key] = (size_bytes, writer)
        return beginnings

    def _launch_each(self, events: Iterable[int | None], needed_by: NeedResults | Deferred) -> None:
        for event in events:
            if event is not None and event in self._chains:
                self._launch([event], needed_by)

    def _launch_all(self, step: GraphBreak) -> None:
        """One kernel for each stream makes what still lives."""
        by_stream: dict[int, list[int]] = {}
        for event, chain in self._chains.items():
            if step.stream is None or chain.stream == step.stream:
                by_stream.setdefault(chain.stream, []).append(event)
        for events in by_stream.values():
            self._launch(events, step)

    def _launch(
        self, events: Sequence[int], needed_by: NeedResults | GraphBreak | Deferred
    ) -> None:
        """One kernel makes the results of these deferred operations of one stream."""
        chains = [self._chains.pop(event) for event in events]
        reads: _Reads = {}
        for chain in chains:
            reads |= chain.reads
        size_bytes = sum(read for read, _ in reads.values())
        size_bytes += sum(chain.written_bytes for chain in chains)
        writers = {self.number_of[w]: None for _, w in reads.values() if w is not None}
        moves = len(chains) == 1 and chains[0].moves
        kernel = Kernel(
            "fused",
            needed_by.thread,
            chains[0].stream,
            needed_by.module,
            needed_by.backward,
            Workload(0, size_bytes, FLOAT32),
            Operands(tuple(writers), moves=moves),
        )
        number = self._begin(kernel)
        for event in events:
            self.number_of[event] = number
            if moves:
                self._moved[event] = number

    def _renumbered(self, operands: Operands) -> Operands:
        if not operands.writers:
            return operands
        factors = operands.factors
        if factors is not None and factors.left is not None:
            factors = factors._replace(left=self.number_of[factors.left])
        writers = tuple(self.number_of[writer] for writer in operands.writers)
        return operands._replace(writers=writers, factors=factors)

    def _begin(self, step: ProgramStep) -> int:
        self._fused.append(step)
        self._events += 1
        return self._events - 1
