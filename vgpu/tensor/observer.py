"""The interface between ``run`` (tensor.py) and a recording of virtual time."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.methods import TensorMethods
from vgpu.tensor.operators import Args, Kwargs, OperatorInfo, tensors_in
from vgpu.tensor.results import Result


class Operation:
    """One call of an operator, as passed to a recording."""

    # Set by the recording.
    stream: Any
    host: Any

    __slots__ = ("args", "gpu", "host", "info", "inputs", "kwargs", "stream", "written")

    def __init__(
        self,
        info: OperatorInfo,
        args: Args,
        kwargs: Kwargs,
        inputs: Sequence[Any],
        written: Sequence[Any],
        gpu: VirtualGPU,
    ) -> None:
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs  # the virtual tensors among the arguments
        self.written = written  # the tensors that the call modifies in place
        self.gpu = gpu


class Observer(Protocol):
    """Called by ``run`` and the handlers; implemented by ``Recording`` (time/recording.py)."""

    def before(self, operation: Operation) -> None:
        """Called before ``operation``. Puts garbage in place of what it reads too early."""

    def after(self, operation: Operation, outputs: Any, result: Result | None) -> None:
        """Called after ``operation``. For shapes, ``result`` is the looked-up result."""

    def before_copy(self, source: torch.Tensor) -> torch.Tensor:
        """Called before a copy. Returns what to read: ``source``, or garbage if it's too early."""

    def after_copy(
        self, source: torch.Tensor, target: torch.Tensor, in_place: bool, waits: bool
    ) -> None:
        """Called after a copy. ``waits`` says whether the host waits for it."""

    def record_stream(self, used: Any, stream: torch.Stream) -> None:
        """Called for ``used.record_stream(stream)``."""


recording: Observer | None = None
"""The active recording; only ``vgpu.time.recording._switched_to`` sets it."""


def virtual_among(values: Iterable[Any]) -> list[Any]:
    """Return the virtual tensors among ``values``, including those in lists and tuples."""
    return [tensor for tensor in tensors_in(tuple(values)) if isinstance(tensor, TensorMethods)]
