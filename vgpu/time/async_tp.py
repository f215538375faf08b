"""Asynchronous tensor parallelism: a product's pieces run beside the pieces of its own collective.

After torch.compile's pass (torch/_inductor/fx_passes/micro_pipeline_tp.py) and what it calls
(``_pipelined_multi_all_gather_and_consume`` and ``_pipelined_produce_and_all2all`` in
torch/distributed/_symmetric_memory). It takes two patterns, each among n GPUs of one host:

- An all-gather whose result is the left factor of matrix products. Each GPU multiplies its own piece
  while the next one comes from a neighbour. All products that read the gather share its pieces.
- A matrix product that only a reduce-scatter reads. While a piece is sent the next one is computed;
  at the end a kernel sums what came.

If a piece takes c to be sent and p to be multiplied, that is (n - 1) · max(c, p) + p in place of
(n - 1) · c + n · p. A copy that brings what was gathered, or what is to be scattered, in another
order falls away if nothing else reads it: the pieces already have that order. What else reads a
gather reads it after the products.

A piece's product costs what CostModel says of so many rows. Copy engines send a piece, at the rate
of the group's ring, and take no multiprocessors.

Compared with what torch's pass makes of a block of vgpu.plan.transformer, compiled for eight ranks with
either kind of checkpoint (torch 2.15): it finds the same pairs, leaves the reduce-scatters of inputs'
gradients, whose products are added first, and copies what it gathered for the gradients of weights,
as here. Beyond that it copies a product's result that is kept for the backward pass (0.4 ms of 75 a
block of 8B on eight H100s), and a gradient's piece before it is gathered (0.1 ms).

Left out: those two; barriers other than that all ranks of a group send a piece at once (15 in a
product and its reduce-scatter); what a copy takes of the memory's bandwidth from a product beside it;
clocks that fall with a limit of power while a GPU does both; two kernels of pieces side by side, which
fill the end of each other's last wave; a right factor that is computed between a gather and its
product, which keeps the two apart here; that torchtitan compiles blocks only, not the last product;
and memory: neither the buffers nor what a copy that falls away would take.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vgpu.time.costs import CostModel, Workload
from vgpu.time.steps import (
    BEGIN_EVENTS,
    Copy,
    Factors,
    GroupCollective,
    HostWait,
    Kernel,
    Program,
    ProgramStep,
    QueryEvent,
    RecordEvent,
    WaitEvent,
)


def in_pieces(program: Program) -> Sequence[ProgramStep]:
    """The program's steps, with pieces in place of such collectives and products."""
    if not program.costs.async_tp:
        return program.steps
    pairs = _Pairs(program)
    return _Rewriting(pairs).steps(program.steps) if pairs.of else program.steps


class _Product(NamedTuple):
    """A matrix product, and what it multiplies."""

    kernel: Kernel
    factors: Factors

    @property
    def result_bytes(self) -> int:
        return self.kernel.work.size_bytes - self.factors.left_bytes - self.factors.right_bytes

    def piece(self, count: int) -> Kernel:
        """One of ``count`` parts of its rows."""
        work = self.kernel.work.of_rows(count, self.factors.right_bytes)
        return self.kernel._replace(work=work)


class _Pair(NamedTuple):
    """The products that read one gather, or the one that a reduce-scatter reads."""

    products: list[_Product]
    is_read: bool = False  # whether something else reads all that was gathered


class _Pairs:
    """Which collectives of a program go together with which products; all by their events."""

    def __init__(self, program: Program) -> None:
        self.of: dict[int, _Pair] = {}
        self.gone: set[int] = set()  # products, and copies that nobody needs any longer
        self._kept = program.kept
        self._steps = [step for step in program.steps if isinstance(step, BEGIN_EVENTS)]
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
        """The matrix product that a thread launches on a stream, if it launches the collective too."""
        step = self._steps[event]
        if not isinstance(step, Kernel) or step.operands.factors is None:
            return None
        if (step.thread, step.stream) != (collective.thread, collective.issued_on):
            return None
        return _Product(step, step.operands.factors)

    def _only_moves(self, event: int, size_bytes: int) -> bool:
        """Whether a kernel does no more than to put so many bytes in another order."""
        step = self._steps[event]
        if not isinstance(step, Kernel) or not step.operands.moves:
            return False
        return len(step.operands.writers) == 1 and step.work.size_bytes == 2 * size_bytes


def _is_in_a_host(collective: GroupCollective, costs: CostModel) -> bool:
    return len(collective.ranks) > 1 and len(costs.hosts_of(collective.ranks)) == 1


class _Rewriting:
    """A program's steps rewritten. Each old event has a new one, with another number."""

    def __init__(self, pairs: _Pairs) -> None:
        self._pairs = pairs
        self._rewritten: list[ProgramStep] = []
        self._events = 0
        self._number: list[int] = []  # the new one, by the old one

    def steps(self, steps: Sequence[ProgramStep]) -> list[ProgramStep]:
        for step in steps:
            if isinstance(step, BEGIN_EVENTS):
                self._number.append(self._with_pieces(len(self._number), step))
            elif isinstance(step, WaitEvent | HostWait | QueryEvent):
                self._rewritten.append(step._replace(event=self._number[step.event]))
            else:
                self._rewritten.append(step)
        return self._rewritten

    def _with_pieces(self, event: int, step: ProgramStep) -> int:
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
        own = _kernel("copy", gather, stream, 2 * piece_bytes)
        self._rewritten.append(
            WaitEvent(gather.stream, self._begin(own))
        )  # to where others find it
        for product in pair.products:
            for right in product.kernel.operands.writers[1:]:
                self._rewritten.append(WaitEvent(stream, self._number[right]))
        last = 0
        for number in range(count):
            if number:
                last = self._begin(gather._replace(name="permute", size_bytes=piece_bytes))
                self._rewritten.append(WaitEvent(stream, last))
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
                self._rewritten.append(WaitEvent(scatter.stream, multiplied))
                last = self._begin(scatter._replace(name="permute", size_bytes=piece_bytes))
        self._rewritten.append(WaitEvent(stream, last))
        return self._begin(_kernel("sum", scatter, stream, scatter.size_bytes + piece_bytes))

    def _begin(self, step: ProgramStep) -> int:
        self._rewritten.append(step)
        self._events += 1
        return self._events - 1


def _kernel(name: str, beside: GroupCollective, stream: int, size_bytes: int) -> Kernel:
    work = Workload(0, size_bytes)
    return Kernel(name, beside.thread, stream, beside.module, beside.backward, work)
