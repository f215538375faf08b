"""What ``run`` (tensor.py) tells a recording of virtual time, before and after each operation."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.lookup import Result
from vgpu.tensor.methods import TensorMethods
from vgpu.tensor.operator_info import OperatorInfo
from vgpu.tensor.operators import Args, Kwargs, tensors_in


class Operation:
    """One call, as a recording sees it."""

    stream: Any  # the recording's
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
        self.written = written  # those that it changes in place
        self.gpu = gpu


class Observer(Protocol):
    """What ``run`` tells a recording (time/recording.py)."""

    def before(self, operation: Operation) -> None:
        """``operation`` comes next. A tensor that is read too early becomes garbage in its args."""

    def after(self, operation: Operation, outputs: Any, result: Result | None) -> None:
        """It has happened. result: what was looked up, of shapes."""

    def before_copy(self, source: torch.Tensor) -> torch.Tensor:
        """A copy comes next. Returns what to read: ``source``, or garbage if it comes too early."""

    def after_copy(
        self, source: torch.Tensor, target: torch.Tensor, in_place: bool, waits: bool
    ) -> None:
        """A copy has happened; waits: whether the host waits for it."""

    def record_stream(self, used: Any, stream: torch.Stream) -> None:
        """``used.record_stream(stream)``."""


recording: Observer | None = None
"""The recording that is on; ``vgpu.time.recording._switched_to`` sets it, and nothing else does."""


def virtual_among(values: Iterable[Any]) -> list[Any]:
    """The virtual tensors among values and in their lists and tuples."""
    return [tensor for tensor in tensors_in(tuple(values)) if isinstance(tensor, TensorMethods)]
