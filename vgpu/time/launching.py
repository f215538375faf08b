"""When the kernels of a recording are launched: each at once, or in chains as compiled code has them."""

from collections.abc import Sequence

from vgpu.tensor.tensor import VirtualTensor
from vgpu.time.clock import Clock
from vgpu.time.costs import Work
from vgpu.time.fusion import Fusion
from vgpu.time.lanes import Done, HostTime, StreamTime
from vgpu.time.races import is_whole
from vgpu.time.steps import NOT_KNOWN, Operands


class Launching:
    """One kernel for each operation, at once; with a ``Fusion``, elementwise ones in chains."""

    def __init__(self, clock: Clock, fusion: Fusion | None) -> None:
        self._clock = clock
        self._fusion = fusion

    def before(
        self,
        stream: StreamTime,
        host: HostTime,
        read: Sequence[VirtualTensor],
        written: Sequence[VirtualTensor],
    ) -> None:
        """Before an operation on ``stream`` uses these tensors."""
        if self._fusion is None:
            return
        if self._clock.several_streams:  # nothing fuses across streams
            self._fusion.write_those_of_others((*read, *written), stream, host)
        # What was put off for the rest of their blocks is not lost.
        self._fusion.write([part for part in written if not is_whole(part)], host)

    def operands(self, name: str, read: Sequence[VirtualTensor], host: HostTime) -> Operands:
        """What an operation reads, which is in memory from now on; ``name`` tells a product."""
        if self._fusion is None:
            return NOT_KNOWN
        self._fusion.write(read, host)
        return self._fusion.operands(name, read)

    def kernel(
        self,
        name: str,
        fuses: bool,
        stream: StreamTime,
        host: HostTime,
        read: Sequence[VirtualTensor],
        work: Work,
    ) -> Done:
        """Hand one operation over. fuses: whether it may be part of a chain."""
        if fuses and self._fusion is not None:
            return self._fusion.put_off(name, stream, host, read, work)
        return self._clock.kernel(name, stream, host, work, self.operands(name, read, host))

    def settle(self, stream: StreamTime | None) -> None:
        """Before someone asks for all that a stream has been given; None: all streams."""
        if self._fusion is not None:
            self._fusion.settle(stream, self._clock.host())

    @property
    def kept(self) -> frozenset[int]:
        """``Program.kept``; asked at the end."""
        return frozenset() if self._fusion is None else self._fusion.kept
