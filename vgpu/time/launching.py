"""When the operations of a recording are launched: each at once, or in chains as compiled code does.

For chains, the steps say what fusion.py has to know: what each operation reads, and when somebody
needs a result in memory.
"""

from collections.abc import Iterable, Sequence

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.tensor import VirtualTensor, block_of
from vgpu.time.call_sites import HostThread
from vgpu.time.costs import Workload, touched_bytes
from vgpu.time.happens_before import DeferredResult, Enqueued, RecordedStream
from vgpu.time.races import Accesses, is_whole
from vgpu.time.recorder import Recorder
from vgpu.time.steps import UNKNOWN_OPERANDS, Factors, Operands, Read


class Launching:
    """One kernel for each operation, at once; of compiled code, elementwise ones in chains.

    All code is compiled if the costs say ``fuses``, else that of ``compiled_call`` (call_sites.py).
    """

    def __init__(self, recorder: Recorder, accesses: Accesses) -> None:
        self._recorder = recorder
        self._accesses = accesses
        self._fuses = recorder.costs.fuses

    def before(
        self,
        stream: RecordedStream,
        host: HostThread,
        read: Sequence[VirtualTensor],
        written: Sequence[VirtualTensor],
    ) -> None:
        """Before an operation on ``stream`` uses these tensors."""
        if not self._recorder.has_deferred:
            return
        if self._recorder.several_streams:  # nothing fuses across streams
            writes = self._writes(_on_gpus((*read, *written)))
            self._need([write for write in writes if write and write.stream is not stream], host)
        if written:  # what was deferred for the rest of their blocks is not lost
            parts = [part for part in _on_gpus(written) if not is_whole(part)]
            self._need(self._writes(parts), host)

    def operands(self, name: str, read: Sequence[VirtualTensor], host: HostThread) -> Operands:
        """What an operation reads, which is in memory from now on; ``name`` tells a product."""
        if not self._recorder.has_deferred:
            return UNKNOWN_OPERANDS
        on_gpus = _on_gpus(read)
        writes = self._writes(on_gpus)
        self._need(writes, host)
        writers = [None if write is None else write.event for write in writes]
        factors = None
        if name == "mm" and len(on_gpus) == 2:  # not into a given tensor
            left, right = on_gpus
            if left.layout is torch.strided and left.stride(1) == 1:
                factors = Factors(writers[0], touched_bytes(left), touched_bytes(right))
        return Operands(tuple(w for w in writers if w is not None), factors=factors)

    def kernel(
        self,
        name: str,
        fuses: bool,
        stream: RecordedStream,
        host: HostThread,
        read: Sequence[VirtualTensor],
        work: Workload,
    ) -> Enqueued:
        """Launch one operation. fuses: whether it may be part of a chain."""
        if not (fuses and (self._fuses or host.compiled)):
            operands = self.operands(name, read, host)
            return self._recorder.kernel(name, stream, host, work, operands)
        reads: list[Read] = []
        written_bytes = work.size_bytes
        for tensor in read:
            size_bytes = touched_bytes(tensor)
            written_bytes -= size_bytes
            if isinstance(tensor._gpu, VirtualGPU):
                write = self._accesses.last_write(tensor)
                writer = None if write is None else write.event
                offset = int(tensor._inner.storage_offset())
                reads.append(Read(writer, id(block_of(tensor)), offset, size_bytes))
        return self._recorder.defer(name, stream, host, tuple(reads), written_bytes)

    def _writes(self, tensors: Iterable[VirtualTensor]) -> list[Enqueued | None]:
        """What wrote each of the tensors in this recording."""
        return [self._accesses.last_write(tensor) for tensor in tensors]

    def _need(self, writes: Iterable[Enqueued | None], host: HostThread) -> None:
        """Somebody needs in memory what these have written."""
        results: list[DeferredResult] = []
        for write in writes:
            if write is not None and write.deferred is not None and not write.deferred.is_needed:
                write.deferred.is_needed = True
                results.append(write.deferred)
        if results:
            self._recorder.need(tuple(result.event for result in results), host)


def _on_gpus(tensors: Iterable[VirtualTensor]) -> list[VirtualTensor]:
    """Without those that are on the host, such as a number."""
    return [tensor for tensor in tensors if isinstance(tensor._gpu, VirtualGPU)]
