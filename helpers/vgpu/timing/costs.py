"""Seconds for an operation, a copy and a collective, from datasheet figures.

An operation lasts as the roofline says (Williams, Waterman and Patterson, 2009): the longer of
FLOPs over FLOP/s and bytes over bytes/s, plus a fixed time to start. FLOPs are counted by torch's
own ``torch.utils.flop_counter``, bytes are those of the tensors. No program reaches a datasheet's
peak, so every peak, of arithmetic, memory and links alike, is multiplied by one ``share_of_peak``.
It is the one figure that may be fitted to a measurement.

Left out: caches, the algorithm that a library picks, a GPU that a small operation cannot fill,
fused kernels, operations that read their input twice (batch norm), TF32, clocks that fall with
heat, and neighbours on the same switch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from helpers.vgpu.device.links import Link
from helpers.vgpu.device.specs import GPUSpec
from helpers.vgpu.timing import collectives
from helpers.vgpu.timing.collectives import Way
from helpers.vgpu.timing.traits import Args, Kwargs, Operator, tensors_in

_TENSOR_CORE_TYPES = (torch.float16, torch.bfloat16)


class Work(NamedTuple):
    """What one call of an operation does, whatever the GPU."""

    flop: int
    size_bytes: int  # read and written
    on_tensor_cores: bool


@dataclass(frozen=True)
class CostModel:
    """How long things take on one model of GPU.

    The times of the host are orders of magnitude, not a datasheet's: a call from Python costs
    PyTorch some 10 µs, a call from the autograd engine, in C++, half of that, a kernel some 2 µs
    to start and to drain.
    """

    spec: GPUSpec
    link: Link = field(default=None)  # type: ignore[assignment]  # the spec's own, unless given
    share_of_peak: float = 0.5
    python_launch_s: float = 10e-6
    engine_launch_s: float = 5e-6
    kernel_s: float = 2e-6

    def __post_init__(self) -> None:
        if not 0 < self.share_of_peak <= 1:
            raise ValueError(f"share_of_peak must be in (0, 1], got {self.share_of_peak}")
        if self.link is None:
            object.__setattr__(self, "link", self.spec.link)

    def kernel_time_s(self, work: Work) -> float:
        """Seconds of one operation on the GPU, from its first to its last instruction."""
        spec = self.spec
        peak = spec.tensor_flop_per_s if work.on_tensor_cores else spec.fp32_flop_per_s
        arithmetic_s = work.flop / peak
        memory_s = work.size_bytes / spec.memory_bandwidth_bytes_per_s
        return max(arithmetic_s, memory_s) / self.share_of_peak + self.kernel_s

    def copy_time_s(self, size_bytes: int) -> float:
        """Seconds of a copy from one GPU to another."""
        return self._over(self.link, size_bytes)

    def host_copy_time_s(self, size_bytes: int) -> float:
        """Seconds of a copy between a GPU and its host."""
        return self._over(self.spec.host_link, size_bytes)

    def collective_time_s(self, name: str, size_bytes: int, count: int) -> float:
        """Seconds of a collective of ``collectives.py`` among ``count`` GPUs."""
        return collectives.seconds(name, size_bytes, count, self._way(self.link))

    def _over(self, link: Link, size_bytes: int) -> float:
        return collectives.seconds("send", size_bytes, 2, self._way(link))

    def _way(self, link: Link) -> Way:
        return Way(link.latency_s, link.bandwidth_bytes_per_s * self.share_of_peak)


def fit_share_of_peak(time_of: Callable[[float], float], measured_s: float) -> float:
    """The ``share_of_peak`` at which ``time_of(share_of_peak)`` is ``measured_s``, within 1/10,000.

    Raises ValueError if even the whole peak is too slow, or even a thousandth of it too fast.
    """
    low, high = 1e-3, 1.0
    if not time_of(high) <= measured_s <= time_of(low):
        raise ValueError(
            f"no share of the datasheet's peaks between {low} and {high} gives {measured_s} s: "
            f"these are {time_of(low):.3g} s and {time_of(high):.3g} s"
        )
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if time_of(middle) > measured_s else (low, middle)
    return math.sqrt(low * high)


def work_of(func: Operator, args: Args, kwargs: Kwargs, result: Any) -> Work:
    """FLOPs and bytes of one call that has happened: the tensors may have no values."""
    count = flop_registry.get(func._overloadpacket)
    flop = int(count(*args, **kwargs, out_val=result)) if count else 0
    # Each argument is read once, each result is written once; one changed in place is both.
    touched = [*tensors_in((args, tuple(kwargs.values()))), *tensors_in(result)]
    size_bytes = sum(touched_bytes(tensor) for tensor in touched)
    half = any(tensor.dtype in _TENSOR_CORE_TYPES for tensor in touched)
    return Work(flop, size_bytes, half)


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading the tensor once takes; an expanded dimension is read once."""
    if tensor.layout is not torch.strided:
        return tensor._nnz() * tensor.element_size() if tensor.layout is torch.sparse_coo else 0
    elements = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride or size == 0:
            elements *= size
    return elements * tensor.element_size()
