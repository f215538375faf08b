"""Passes over a program's steps that model ``torch.compile``.

Fusion. An elementwise operation or a reduction is deferred until something else needs its result (a
matmul, a collective, another stream, or the host), or until its own stream waits for another, which
ends compiled code. Then one kernel reads the inputs of the chain of operations and writes its
result. Anything else that needs an intermediate result recomputes it from the same inputs, as
torch.compile's partitioner does between the forward and backward passes; an intermediate result
that's never needed outside its chain is never written. The limit on a chain's length is
TorchInductor's (``realize_acc_reads_threshold`` in torch/_inductor/config.py). Operations on
complex tensors are never part of a chain: TorchInductor generates no code for them
(``unsupported_input_tensor`` in torch/_inductor/lowering.py).

Fusion doesn't model the memory that a compiled program saves, templates that fuse elementwise
operations into matmuls, CUDA graphs, or generated kernels that are faster or slower than those they
replace.

Asynchronous tensor parallelism. A matmul is split into pieces, which run concurrently with the
pieces of its collective. The pass is modeled on torch.compile's
(torch/_inductor/fx_passes/micro_pipeline_tp.py; ``_pipelined_multi_all_gather_and_consume`` and
``_pipelined_produce_and_all2all`` in torch/distributed/_symmetric_memory). It matches two patterns,
each among n GPUs of one host:

- An all-gather whose result is the left operand of matmuls. Each GPU multiplies the piece that it
  has while it receives the next one from a neighbor. All matmuls that read the gathered tensor
  share its pieces.
- A matmul whose result is read only by a reduce-scatter. While one piece is being sent, the next
  one is computed; at the end, a kernel sums the received pieces.

If sending a piece takes c and multiplying it takes p, the total is (n - 1) · max(c, p) + p instead
of (n - 1) · c + n · p. A copy that reorders a gathered tensor, or one that's about to be scattered,
is eliminated if nothing else reads it: the pieces already have that order. Other readers of a
gathered tensor run after the matmuls.

CostModel predicts the time of a piece's matmul from its number of rows. Copy engines send the
pieces at the rate of the group's ring, and occupy no multiprocessors.

torch's own pass was compared with this one on a block of vgpu.plan.transformer, compiled for eight
ranks with either kind of recomputation (torch 2.15). It finds the same pairs. Like this pass, it
skips the reduce-scatters of input gradients, because the results of multiple matmuls are added
first, and it makes a copy of a gathered tensor that a weight gradient needs. Unlike this pass, it
also copies a matmul's result that's kept for the backward pass (0.4 of the 75 ms per block of the
8B model on eight H100s), and each piece of a gradient before it's gathered (0.1 ms).

This pass doesn't model those two copies; barriers (15 in a matmul and its reduce-scatter), except
that all ranks of a group send a piece at the same time; the memory bandwidth that a copy takes from
a concurrent matmul; lower clocks when a GPU at its power limit copies and computes at once; kernels
of two pieces that run side by side and fill the end of each other's last wave; a right operand
that's computed between a gather and its matmul, which keeps this pass from pairing the two; the
fact that torchtitan compiles only the blocks, not the last matmul; and memory, both of the buffers
and of the eliminated copies.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vgpu.time.costs import CostModel
from vgpu.time.steps import (
    Copy,
    Deferred,
    EventStep,
    Factors,
    GraphBreak,
    GroupCollective,
    HostWait,
    Issuer,
    Kernel,
    NeedResults,
    Operands,
    Program,
    ProgramStep,
    QueryEvent,
    Read,
    RecordEvent,
    Release,
    WaitEvent,
)
from vgpu.time.workloads import FLOAT32, Workload


class _Pass:
    """Replaces steps of a program with others, and renumbers its events."""

    def __init__(self) -> None:
        self.number_of: list[int] = []
        """Each event's number after the pass, by its number before the pass."""
        self._made: list[ProgramStep] = []
        self._events = 0

    def _begin(self, step: EventStep) -> int:
        self._made.append(step)
        self._events += 1
        return self._events - 1

    def _keep(self, step: ProgramStep) -> None:
        if isinstance(step, WaitEvent | HostWait | QueryEvent):
            step = step._replace(event=self.number_of[step.event])
        self._made.append(step)


# Fusion

# If a chain would have more inputs than this, its intermediate results are written to memory first.
_MOST_READS = 8

# Operations that only reorder their input. A copy may also change the dtype; its size
# shows whether it does.
_MOVES = {"cat", "clone", "copy"}

# The inputs of a chain. A key identifies an input by whether it was written before the recording,
# by its block (if it was) or the event that wrote it (if not), and by its offset in the block. A
# value holds the bytes to read and that event.
_Reads = dict[tuple[bool, int, int], tuple[int, int | None]]


class _Chain(NamedTuple):
    """One deferred operation, fused with the deferred operations whose results it reads."""

    stream: int
    reads: _Reads
    written_bytes: int
    moves: bool


class Fusion(_Pass):
    """Fuses the steps of a program, which can be passed in multiple parts."""

    def __init__(self) -> None:
        super().__init__()
        self._chains: dict[int, _Chain] = {}  # those neither launched nor released
        # For live results that are only reordered inputs: the result's event → the kernel's.
        self._moved: dict[int, int] = {}

    def steps(self, steps: Iterable[ProgramStep]) -> list[ProgramStep]:
        """Return the program's next steps, with fused kernels in place of deferred operations."""
        self._made = []
        for step in steps:
            if isinstance(step, Deferred):
                self._defer(step)
            elif isinstance(step, NeedResults):
                self._launch_each(step.events, step.by)
            elif isinstance(step, GraphBreak):
                self._launch_all(step)
            elif isinstance(step, Release):
                self._chains.pop(step.event, None)
                self._moved.pop(step.event, None)
            elif isinstance(step, EventStep):
                if isinstance(step, Kernel | Copy | GroupCollective):
                    step = step._replace(operands=self._renumbered(step.operands))
                self.number_of.append(self._begin(step))
            else:
                self._keep(step)
        return self._made

    @property
    def kept(self) -> frozenset[int]:
        """The value of ``Program.kept``, final once all steps have been passed."""
        return frozenset(self._moved.values())

    def _defer(self, step: Deferred) -> None:
        moves = step.name in _MOVES and all(
            self._chains[read.writer].moves for read in step.reads if read.writer in self._chains
        )
        reads = self._beginnings(step.reads)
        if len(reads) > _MOST_READS:
            self._launch_each([read.writer for read in step.reads], step.by)
            reads = self._beginnings(step.reads)
        self._chains[len(self.number_of)] = _Chain(step.stream, reads, step.written_bytes, moves)
        self.number_of.append(self._begin(RecordEvent(step.stream)))

    def _beginnings(self, reads: Iterable[Read]) -> _Reads:
        """Return the inputs of the chain that ends with an operation that reads ``reads``."""
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

    def _launch_each(self, events: Iterable[int | None], by: Issuer) -> None:
        for event in events:
            if event is not None and event in self._chains:
                self._launch([event], by)

    def _launch_all(self, step: GraphBreak) -> None:
        """Launch one kernel per stream, each of which writes the stream's live results."""
        by_stream: dict[int, list[int]] = {}
        for event, chain in self._chains.items():
            if step.stream is None or chain.stream == step.stream:
                by_stream.setdefault(chain.stream, []).append(event)
        for events in by_stream.values():
            self._launch(events, step.by)

    def _launch(self, events: Sequence[int], by: Issuer) -> None:
        """Launch one kernel that writes the results of one stream's deferred operations."""
        chains = [self._chains.pop(event) for event in events]
        reads: _Reads = {}
        for chain in chains:
            reads |= chain.reads
        size_bytes = sum(read for read, _ in reads.values())
        size_bytes += sum(chain.written_bytes for chain in chains)
        writers = {self.number_of[w]: None for _, w in reads.values() if w is not None}
        moves = len(chains) == 1 and chains[0].moves
        operands = Operands(tuple(writers), moves=moves)
        work = Workload(0, size_bytes, FLOAT32)
        number = self._begin(Kernel("fused", by, chains[0].stream, work, operands))
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


# Asynchronous tensor parallelism


def in_pieces(program: Program) -> Sequence[ProgramStep]:
    """Return the program's steps, with matching collectives and matmuls split into pieces."""
    if not program.costs.async_tp:
        return program.steps
    pairs = _Pairs(program)
    return _InPieces(pairs).steps(program.steps) if pairs.of else program.steps


class _Product(NamedTuple):
    """A matmul and its operands."""

    kernel: Kernel
    factors: Factors

    @property
    def result_bytes(self) -> int:
        assert self.kernel.work.product is not None
        return self.kernel.work.product.written_bytes

    def piece(self, count: int) -> Kernel:
        """Return the matmul for one of ``count`` equal parts of the rows."""
        work = self.kernel.work.of_rows(count, self.factors.right_bytes)
        return self.kernel._replace(work=work)


class _Pair(NamedTuple):
    """The matmuls that read an all-gather's result, or the one whose result is reduce-scattered."""

    products: list[_Product]
    is_read: bool = False  # whether anything else reads the gathered tensor


class _Pairs:
    """The matmuls that are paired with a program's collectives, all identified by their events."""

    def __init__(self, program: Program) -> None:
        self.of: dict[int, _Pair] = {}
        self.gone: set[int] = set()  # paired matmuls, and copies that are no longer needed
        self._kept = program.kept
        self._steps = [step for step in program.steps if isinstance(step, EventStep)]
        self._readers: dict[int, list[int]] = {}
        for event, step in enumerate(self._steps):
            if isinstance(step, Kernel | Copy | GroupCollective):
                for writer in set(step.operands.writers):
                    self._readers.setdefault(writer, []).append(event)
        in_hosts = [
            (event, step)
            for event, step in enumerate(self._steps)
            if isinstance(step, GroupCollective) and _is_in_a_host(step, program.costs)
        ]
        for event, step in in_hosts:
            if step.name == "all_gather":
                self._gather(event, step)
        for event, step in in_hosts:
            if step.name == "reduce_scatter":
                self._scatter(event, step)

    def _gather(self, event: int, gather: GroupCollective) -> None:
        readers = self._readers.get(event, [])
        copies = [reader for reader in readers if self._only_moves(reader, gather.size_bytes)]
        products: dict[int, _Product] = {}
        for source in (event, *copies):
            for reader in self._readers.get(source, []):
                product = self._product(reader, gather)
                if (
                    product is not None
                    and product.factors.left == source
                    and product.factors.left_bytes == gather.size_bytes
                    and all(right < event for right in product.kernel.operands.writers[1:])
                ):
                    products[reader] = product
        if products:
            self.gone |= set(products)
            for copy in copies:
                if copy not in self._kept and self.gone.issuperset(self._readers.get(copy, [])):
                    self.gone.add(copy)
            is_read = not self.gone.issuperset(readers)
            self.of[event] = _Pair([products[one] for one in sorted(products)], is_read)

    def _scatter(self, event: int, scatter: GroupCollective) -> None:
        reader, copies, writers = event, list[int](), scatter.operands.writers
        while len(writers) == 1 and self._readers[writers[0]] == [reader]:
            (source,) = writers
            product = self._product(source, scatter)
            if product is not None:
                if source not in self.gone and product.result_bytes == scatter.size_bytes:
                    self.gone |= {source, *copies}
                    self.of[event] = _Pair([product])
                return
            if source in self._kept or not self._only_moves(source, scatter.size_bytes):
                return
            copies.append(source)
            step = self._steps[source]
            assert isinstance(step, Kernel)
            reader, writers = source, step.operands.writers

    def _product(self, event: int, collective: GroupCollective) -> _Product | None:
        """Return an event's matmul if the collective's thread issued it on the same stream."""
        step = self._steps[event]
        if not isinstance(step, Kernel) or step.operands.factors is None:
            return None
        if (step.by.thread, step.stream) != (collective.by.thread, collective.issued_on):
            return None
        return _Product(step, step.operands.factors)

    def _only_moves(self, event: int, size_bytes: int) -> bool:
        """Whether a kernel does nothing but reorder ``size_bytes``."""
        step = self._steps[event]
        if not isinstance(step, Kernel) or not step.operands.moves:
            return False
        return len(step.operands.writers) == 1 and step.work.size_bytes == 2 * size_bytes


def _is_in_a_host(collective: GroupCollective, costs: CostModel) -> bool:
    return len(collective.ranks) > 1 and len(costs.hosts_of(collective.ranks)) == 1


class _InPieces(_Pass):
    """Splits paired collectives and matmuls into pieces."""

    def __init__(self, pairs: _Pairs) -> None:
        super().__init__()
        self._pairs = pairs

    def steps(self, steps: Sequence[ProgramStep]) -> list[ProgramStep]:
        for step in steps:
            if isinstance(step, EventStep):
                self.number_of.append(self._with_pieces(len(self.number_of), step))
            else:
                self._keep(step)
        return self._made

    def _with_pieces(self, event: int, step: EventStep) -> int:
        if event in self._pairs.gone:
            assert isinstance(step, Kernel)
            return self._begin(RecordEvent(step.stream))
        pair = self._pairs.of.get(event)
        if pair is None:
            return self._begin(step)
        assert isinstance(step, GroupCollective)
        return self._gather(step, pair) if step.name == "all_gather" else self._scatter(step, pair)

    def _gather(self, gather: GroupCollective, pair: _Pair) -> int:
        count, stream = len(gather.ranks), pair.products[0].kernel.stream
        piece_bytes = gather.size_bytes // count
        # Each rank first copies its own piece to where the other ranks read it.
        own = Kernel("copy", gather.by, stream, Workload(0, 2 * piece_bytes))
        self._made.append(WaitEvent(gather.stream, self._begin(own)))
        for product in pair.products:
            for right in product.kernel.operands.writers[1:]:
                self._made.append(WaitEvent(stream, self.number_of[right]))
        last = 0
        for number in range(count):
            if number:
                last = self._begin(gather._replace(name="permute", size_bytes=piece_bytes))
                self._made.append(WaitEvent(stream, last))
            for product in pair.products:
                self._begin(product.piece(count))
        return self._begin(own) if pair.is_read else last

    def _scatter(self, scatter: GroupCollective, pair: _Pair) -> int:
        (product,), count = pair.products, len(scatter.ranks)
        stream, piece_bytes = product.kernel.stream, scatter.size_bytes // count
        last = 0
        for number in range(count):
            multiplied = self._begin(product.piece(count))
            if number < count - 1:
                self._made.append(WaitEvent(scatter.stream, multiplied))
                last = self._begin(scatter._replace(name="permute", size_bytes=piece_bytes))
        self._made.append(WaitEvent(stream, last))
        summed = Workload(0, scatter.size_bytes + piece_bytes)
        return self._begin(Kernel("sum", scatter.by, stream, summed))
