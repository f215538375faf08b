"""When the kernels of a recording are launched: each at once, or in chains as compiled code has them."""

from collections.abc import Sequence

from helpers.vgpu.dispatch.tensor import VirtualTensor
from helpers.vgpu.timing.clock import Clock
from helpers.vgpu.timing.compiled.fusion import Fusion, LastWrite
from helpers.vgpu.timing.costs import Work
from helpers.vgpu.timing.lanes import Done, HostTime, StreamTime
from helpers.vgpu.timing.play.steps import NOT_KNOWN, Operands
from helpers.vgpu.timing.races import is_whole


class Launching:
    """One kernel for each operation, at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def before(
        self,
        stream: StreamTime,
        host: HostTime,
        read: Sequence[VirtualTensor],
        written: Sequence[VirtualTensor],
    ) -> None:
        """Before an operation on ``stream`` uses these tensors."""

    def operands(self, name: str, read: Sequence[VirtualTensor], host: HostTime) -> Operands:
        """What an operation reads, which is in memory from now on; ``name`` tells a product."""
        return NOT_KNOWN

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
        return self._clock.kernel(name, stream, host, work, self.operands(name, read, host))

    def settle(self, stream: StreamTime | None) -> None:
        """Before someone asks for all that a stream has been given; None: all streams."""

    @property
    def kept(self) -> frozenset[int]:
        """``Program.kept``; asked at the end."""
        return frozenset()


class Fused(Launching):
    """Elementwise chains in one kernel, when their results are needed."""

    def __init__(self, clock: Clock, last_write: LastWrite) -> None:
        """last_write: what wrote a tensor in this recording."""
        super().__init__(clock)
        self._fusion = Fusion(clock, last_write)

    def before(
        self,
        stream: StreamTime,
        host: HostTime,
        read: Sequence[VirtualTensor],
        written: Sequence[VirtualTensor],
    ) -> None:
        if self._clock.several_streams:  # nothing fuses across streams
            self._fusion.write_those_of_others((*read, *written), stream, host)
        # What was put off for the rest of their blocks is not lost.
        self._fusion.write([part for part in written if not is_whole(part)], host)

    def operands(self, name: str, read: Sequence[VirtualTensor], host: HostTime) -> Operands:
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
        if fuses:
            return self._fusion.put_off(name, stream, host, read, work)
        return super().kernel(name, fuses, stream, host, read, work)

    def settle(self, stream: StreamTime | None) -> None:
        self._fusion.settle(stream, self._clock.host())

    @property
    def kept(self) -> frozenset[int]:
        return self._fusion.kept
