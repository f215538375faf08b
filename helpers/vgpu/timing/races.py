"""Who wrote and who reads each block of memory, and whether a stream forgot to wait.

On CUDA a forgotten wait gives right values on some days and garbage on others. Here it is always
noted, whatever the times are; and if the times say that a value is not written yet when it is read,
the reader gets NaN (or the smallest number of a type that has no NaN).

Not seen: reads from before the recording's first use of a second stream; a block that is freed
while another stream still uses it (``record_stream``), since no block is used twice here; and a
host that reads a copy before it has ended.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from helpers.vgpu.dispatch import tensor
from helpers.vgpu.dispatch.tensor import VirtualTensor
from helpers.vgpu.timing import module_names
from helpers.vgpu.timing.clock import Clock
from helpers.vgpu.timing.lanes import Done, HostTime, StreamTime, in_backward
from helpers.vgpu.timing.trace import Race, Timeline
from helpers.vgpu.timing.traits import Args, Kwargs


class Accesses:
    """The accesses of one recording."""

    def __init__(self, clock: Clock, timeline: Timeline) -> None:
        self._clock = clock
        self._timeline = timeline

    def check(
        self,
        name: str,
        read: Iterable[VirtualTensor],
        written: Iterable[VirtualTensor],
        stream: StreamTime,
        host: HostTime,
    ) -> list[VirtualTensor]:
        """Whether what the next operation of ``stream`` uses is ready.

        In a backward pass the autograd engine makes streams wait. Elsewhere a race is noted.
        Returns the tensors that are not written yet when the operation starts.
        """
        late: list[VirtualTensor] = []
        if not self._clock.several_streams:
            return late
        for used in read:
            write: Done | None = tensor.block_of(used).last_write
            if write is None or write.stream is stream:
                continue
            races = self._races(name, stream, write)
            if races and write.end_s > self._clock.ready_s(stream, host):
                late.append(used)
        for used in written:
            block = tensor.block_of(used)
            for before in (block.last_write, *(block.last_reads or {}).values()):
                if before is not None and before.stream is not stream:
                    self._races(name, stream, before)
        return late

    def _races(self, name: str, stream: StreamTime, before: Done) -> bool:
        """Whether the stream's next operation may start before ``before`` has ended."""
        if before.stream.clock is not self._clock or self._clock.comes_after(stream, before):
            return False
        if in_backward():
            stream.wait_done(before)
            return False
        race = Race(
            operation=name,
            device=stream.device,
            stream=stream.number,
            other_operation=before.operation,
            other_stream=before.stream.number,
            module=module_names.current(),
        )
        if race not in self._timeline.races:
            self._timeline.races.append(race)
        return True

    def note(
        self, done: Done, read: Iterable[VirtualTensor], written: Iterable[VirtualTensor]
    ) -> None:
        """Remember what an operation has read and written."""
        if self._clock.several_streams:
            for used in read:
                block = tensor.block_of(used)
                if block.last_reads is None:
                    block.last_reads = {}
                block.last_reads[done.stream] = done
        for used in written:
            block = tensor.block_of(used)
            block.last_write = done
            block.last_reads = None


def poisoned(value: VirtualTensor) -> VirtualTensor:
    """A tensor like ``value`` that holds garbage."""
    garbage = torch.empty_like(value._inner)
    _fill(garbage)
    return tensor.wrap(garbage, value._gpu, "garbage")


def replaced(
    late: Sequence[VirtualTensor], written: Sequence[torch.Tensor], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """The arguments with garbage for the ``late`` tensors.

    One that is to be changed in place holds garbage itself from now on, as its memory would.
    """
    substitutes = {}
    for value in late:
        if any(value is other for other in written):
            _fill(value._inner)
        else:
            substitutes[id(value)] = poisoned(value)

    def swap(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([swap(item) for item in value])
        return substitutes.get(id(value), value)

    return swap(args), {name: swap(value) for name, value in kwargs.items()}


def _fill(values: torch.Tensor) -> None:
    if values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    elif values.dtype is not torch.bool:
        values.fill_(torch.iinfo(values.dtype).min)
