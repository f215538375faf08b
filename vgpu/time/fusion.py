"""Elementwise operations fused as ``torch.compile`` does it: chains go once through memory.

An elementwise operation or a reduction is put off until something else needs its result: a matrix
product, a collective, another stream, or the host; or until its own stream waits for another, since
compiled code ends there. Then one kernel reads what the chain began with and writes the result.
Whatever else needs an intermediate result computes it again from the same beginnings, as
torch.compile's partitioner has it between forward and backward pass; one that is never needed
outside its chain is never written. The source of the limit on a chain's length is TorchInductor
(torch/_inductor/config.py, ``realize_acc_reads_threshold``).

Left out: what a compiled program saves of memory; templates that fuse into matrix products; CUDA
graphs; kernels that are faster or slower than the ones they replace.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.tensor import VirtualTensor, block_of
from vgpu.time.clock import Clock
from vgpu.time.costs import FLOAT32, Work, touched_bytes
from vgpu.time.lanes import Done, HostTime, StreamTime
from vgpu.time.steps import Factors, Operands

# A chain that begins with more tensors than these has its inputs written first.
_MOST_READS = 8

# What only puts what it reads in another order; a copy may change the type, and its size tells.
_MOVES = {"cat", "clone", "copy"}

LastWrite = Callable[[VirtualTensor], Done | None]


class PutOff:
    """What one operation makes, while no kernel has made it. It lives as long as its blocks do."""

    __slots__ = ("__weakref__", "made", "moves", "number", "reads", "stream", "written_bytes")

    def __init__(
        self, number: int, stream: StreamTime, reads: "_Reads", written_bytes: int, moves: bool
    ) -> None:
        self.number = number
        self.stream = stream
        self.reads = reads
        self.written_bytes = written_bytes
        self.moves = moves
        self.made: Done | None = None


# What a chain begins with: bytes, by who wrote them and where in a block they lie. The writer is
# held, so that no other gets its id.
_Reads = dict[tuple[int, int], tuple[int, Done | None]]


class Fusion:
    """The operations of one recording that are put off."""

    def __init__(self, clock: Clock, last_write: LastWrite) -> None:
        """last_write: what wrote a tensor in this recording."""
        self._clock = clock
        self._last_write = last_write
        self._waiting: weakref.WeakValueDictionary[int, PutOff] = weakref.WeakValueDictionary()
        self._moved: weakref.WeakValueDictionary[int, PutOff] = weakref.WeakValueDictionary()
        self._count = 0

    @property
    def kept(self) -> frozenset[int]:
        """The moments of what was only moved and still lives."""
        return frozenset(self._moved)

    def operands(self, name: str, inputs: Sequence[VirtualTensor]) -> Operands:
        """What an operation reads that nobody has put off; ``name`` tells a matrix product."""
        of_gpu = [tensor for tensor in inputs if isinstance(tensor._gpu, VirtualGPU)]
        written = [self._last_write(tensor) for tensor in of_gpu]
        moments = [None if done is None else _moment(done) for done in written]
        factors = None
        if name == "mm" and len(of_gpu) == 2:  # not into a given tensor
            left, right = of_gpu
            if left.layout is torch.strided and left.stride(1) == 1:
                factors = Factors(moments[0], touched_bytes(left), touched_bytes(right))
        return Operands(tuple(m for m in moments if m is not None), factors=factors)

    def put_off(
        self,
        name: str,
        stream: StreamTime,
        host: HostTime,
        inputs: Sequence[VirtualTensor],
        work: Work,
    ) -> Done:
        """One operation that can be fused; returns what its results are made by."""
        given_bytes = sum(touched_bytes(tensor) for tensor in inputs)
        moves = name in _MOVES and all(self._only_moved(tensor) for tensor in inputs)
        reads = self._reads(inputs)
        if len(reads) > _MOST_READS:
            self.write(inputs, host)
            reads = self._reads(inputs)
        self._count += 1
        made = PutOff(self._count, stream, reads, work.size_bytes - given_bytes, moves)
        self._waiting[self._count] = made
        # Whoever waits for the stream has it launched first, so no wait until now covers it.
        done = self._clock.allocation(name, stream, host.backward)
        return done._replace(position=stream.count + 1, put_off=made)

    def write(self, tensors: Iterable[VirtualTensor], host: HostTime) -> None:
        """Someone needs these tensors in memory: launch the kernels that make them."""
        for tensor in tensors:
            made = self._put_off_of(tensor)
            if made is not None:
                self._fused([made], host)

    def write_those_of_others(
        self, tensors: Iterable[VirtualTensor], stream: StreamTime, host: HostTime
    ) -> None:
        """Whose results another stream has put off: no chain goes on from stream to stream."""
        for tensor in tensors:
            made = self._put_off_of(tensor)
            if made is not None and made.stream is not stream:
                self._fused([made], host)

    def settle(self, stream: StreamTime | None, host: HostTime) -> None:
        """Someone may need all that the stream has been given: one kernel makes what still lives.

        None: all streams.
        """
        by_stream: dict[StreamTime, list[PutOff]] = {}
        for made in self._waiting.values():
            if stream is None or made.stream is stream:
                by_stream.setdefault(made.stream, []).append(made)
        for together in by_stream.values():
            self._fused(together, host)

    def _fused(self, made: Sequence[PutOff], host: HostTime) -> None:
        reads: _Reads = {}
        for one in made:
            reads |= one.reads
        size_bytes = sum(read for read, _ in reads.values()) + sum(o.written_bytes for o in made)
        writers = {_moment(writer): None for _, writer in reads.values() if writer is not None}
        operands = Operands(tuple(writers), moves=len(made) == 1 and made[0].moves)
        work = Work(0, size_bytes, FLOAT32)
        done = self._clock.kernel("fused", made[0].stream, host, work, operands)
        for one in made:
            one.made = done
            if operands.moves:
                self._moved[done.moment] = one
            one.reads = {}
            self._waiting.pop(one.number, None)

    def _reads(self, inputs: Iterable[VirtualTensor]) -> _Reads:
        found: _Reads = {}
        for tensor in inputs:
            if not isinstance(tensor._gpu, VirtualGPU):
                continue  # a number that lies on the host
            writer = self._last_write(tensor)
            made = _still_put_off(writer)
            if made is not None:
                found |= made.reads
                continue
            key = (id(writer or block_of(tensor)), int(tensor._inner.storage_offset()))
            size_bytes = max(touched_bytes(tensor), found.get(key, (0, None))[0])
            found[key] = (size_bytes, writer)
        return found

    def _put_off_of(self, tensor: VirtualTensor) -> PutOff | None:
        on_gpu = isinstance(tensor._gpu, VirtualGPU)
        return _still_put_off(self._last_write(tensor)) if on_gpu else None

    def _only_moved(self, tensor: VirtualTensor) -> bool:
        made = self._put_off_of(tensor)
        return made is None or made.moves


def _still_put_off(done: Done | None) -> PutOff | None:
    """What ``done`` has put off, if no kernel has made it yet."""
    put_off: PutOff | None = None if done is None else done.put_off
    return put_off if put_off is not None and put_off.made is None else None


def _moment(done: Done) -> int:
    """When what ``done`` made was in memory."""
    return done.launched.moment
