"""The time that an operation, a copy or a collective takes, according to datasheets.

Operations follow the roofline model (Williams, Waterman and Patterson, 2009): the time is FLOPs
over FLOP/s or bytes over bytes/s, whichever is longer, plus a fixed startup time. A matmul takes
longer if its tiles don't fill the GPU, and must also write its result (hardware.py). workloads.py
counts the FLOPs and bytes. No program reaches a datasheet's peaks, so arithmetic, memory and links
each reach only a share of them: see ``CostModel``.

Not modeled: caches, the algorithm that a library picks, convolutions and elementwise operations
that are too small to fill a GPU, operations that read their input twice (batch norm), float64
(counted as float32), clocks throttled by heat or power, the memory bandwidth that NCCL's kernels
take from concurrent kernels, and traffic from neighbors on the same switch.
"""

import functools
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

from vgpu.collectives import table as collectives
from vgpu.collectives.table import Route
from vgpu.hardware import (
    GPUSpec,
    Link,
    Network,
    get_link,
    get_network,
    get_spec,
    product_seconds,
)
from vgpu.time.workloads import BFLOAT16, FLOAT8, FLOAT16, Attention, Workload

# The speed of fused attention, from published measurements of its kernels
#
# The kernels reach a different share of a GPU's peak than matmuls, so they have their own figures.
# The longer the sequence, the closer a kernel gets to its top speed, because the start and end of
# each tile, and tiles that the mask cuts in half, matter less. ``best / (1 + tokens / length)``
# matches the bars in the FlashAttention-2 paper to within 4%. On long sequences, a causal mask
# halves the time: a kernel reaches the same FLOP/s with and without the mask, for half the FLOPs.
#
# FLOPs are counted as in the papers: two matmuls in the forward pass and five in the backward pass,
# or half as many FLOPs with a causal mask.
#
# Not modeled: too few heads and sequences to fill the GPU (the figures are for 16k tokens in
# total), dropout, and heads wider than 128, which are assumed to be as fast as heads of width 128.


class _Speed(NamedTuple):
    """One kernel's TFLOP/s, with or without a causal mask, forward and backward together."""

    narrow: float  # for a head width of 64, in the limit of long sequences
    wide: float  # for a head width of 128, in the same limit
    tokens: float  # the sequence length at which the kernel reaches half of these speeds
    forward: float = 1.0  # the forward pass's own speed, as a multiple of these speeds


class _Measured(NamedTuple):
    peak: float  # the GPU's peak, in TFLOP/s
    full: _Speed
    causal: _Speed


# Dao, 2023, FlashAttention-2, figures 4 and 7: FlashAttention 1 and 2 on an A100 80 GB SXM4 and an
# H100 80 GB SXM5, and the Triton version on the A100, for 512 to 16k tokens. (The bars are also in
# Dao-AILab/flash-attention, assets/flash2_{a100,h100}_fwd_bwd_benchmark.png.) According to section
# 4.1 of the paper, version 2 is 1.3 to 1.5 times as fast as Triton in the forward pass, and about
# twice as fast in the backward pass. Triton's row for the H100, which nobody measured, and Triton's
# ratio of forward to backward speed are derived from that. Shah et al., 2024, FlashAttention-3:
# figure 5 for the forward pass; the backward pass is 1.5 to 1.75 times as fast as version 2's.
# cuDNN 9's speed is within 15% of version 3's.
#
# MooreThreads/SimuMax at 4dcaae5, configs/system/b200_bf16_ceperm.json: Transformer Engine's
# attention on a B200, presumably cuDNN's, with heads of width 128 and a causal mask. (It counts
# FLOPs as if there were no mask.) Both passes together match to within 11%, with 64 or 128 heads for
# 4,096 tokens, and with 8 or 16 for 32,768 and 131,072; with 8 or 16 heads, 4,096 tokens are slower
# than this. For heads of width 64, and without a mask, we assume the H100's ratios.
_FLASH_2_A100 = _Measured(312, _Speed(178, 204, 182), _Speed(174, 193, 505))
KERNELS: dict[str, dict[int, _Measured]] = {
    "flash 1": {
        8: _Measured(312, _Speed(111, 83, 80), _Speed(99, 84, 430)),
        9: _Measured(989, _Speed(168, 139, 50), _Speed(158, 139, 380)),
    },
    "triton": {
        8: _Measured(312, _Speed(101, 96, 80, 1.5), _Speed(81, 81, 250, 1.7)),
        9: _Measured(989, _Speed(164, 186, 110, 1.3), _Speed(159, 184, 310, 1.3)),
    },
    "flash 2": {
        8: _FLASH_2_A100,
        9: _Measured(989, _Speed(300, 340, 195), _Speed(290, 335, 525)),
    },
    "flash 3": {
        8: _FLASH_2_A100,  # version 3 is only for the H100; an A100 runs version 2
        9: _Measured(989, _Speed(468, 552, 220, 1.1), _Speed(468, 549, 580, 1.1)),
        10: _Measured(2250, _Speed(890, 1050, 190, 1.17), _Speed(890, 1040, 500, 1.17)),
    },
}
"""Each kernel's speeds, by the major version of the GPU's compute capability."""


def attention_flop_per_s(kernel: str, spec: GPUSpec, attention: Attention) -> float:
    """Return the FLOP/s of a fused attention kernel, one of ``KERNELS``, in a 16-bit type.

    Other GPUs are assumed to reach the same share of their peak as the nearest one in ``KERNELS``.
    """
    speeds, (major, _) = KERNELS[kernel], spec.compute_capability
    measured = speeds[max((own for own in speeds if own <= major), default=min(speeds))]
    speed = measured.causal if attention.causal else measured.full
    wide = min(max((attention.head_width - 64) / 64, 0.0), 1.0)
    both = speed.narrow + wide * (speed.wide - speed.narrow)
    both /= 1 + speed.tokens / attention.length
    forward = both * speed.forward
    # The backward pass has 2.5 times as many FLOPs as the forward pass.
    reached = 2.5 / (3.5 / both - 1 / forward) if attention.backward else forward
    return spec.tensor_flop_per_s * reached / measured.peak


# The cost model


def check_seconds(name: str, value: object) -> None:
    """Raise ValueError unless the value is a finite, non-negative number.

    NaN would make a simulator wait forever, and a negative time would end a step before it starts.
    """
    wanted = "a finite, non-negative number of seconds"
    _check(name, value, wanted, lambda time_s: 0 <= time_s < math.inf)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check(name: str, value: Any, wanted: str, holds: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not holds(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


_SHARES = ("arithmetic_share", "memory_share", "link_share", "network_share", "locked_share")
_SECONDS = ("python_launch_s", "engine_launch_s", "kernel_s")
# Each count's minimum.
_COUNTS = {"gpus_per_host": 0, "collective_processors": 0, "slowest_of": 1}


@dataclass(frozen=True)
class CostModel:
    """How long operations, copies and collectives take on one GPU model.

    Four shares are the fractions of the datasheet's peaks that programs reach. They're assumed,
    not measured, except where a lesson says that it fits one to a published time.

    - ``arithmetic_share`` is the share of the rate that hardware.py derives from the peak and the
      sizes. The best bfloat16 matmuls reach 0.87 (A100) and 0.80 (H100) of the peak
      (stas00/ml-engineering); convolutions in real networks reach less. 0.5 is assumed.
    - ``memory_share`` is the share of the memory bandwidth. Kernels that only read and write reach
      0.7 to 0.9, depending on the GPU (BabelStream; Deakin et al., 2018). 0.8 is assumed.
    - ``link_share`` is the share of a link's bandwidth. p2pBandwidthLatencyTest reaches about 0.8
      over PCIe and 0.96 over a V100's NVLink (Dell, 2018); NCCL's collectives on eight H100s reach
      0.56 to 0.97 (Ultra-Scale Playbook, 2025). 0.8 is assumed for every link.
    - ``network_share``, for the adapters between hosts, is also assumed to be 0.8.

    ``attention`` selects the fused attention kernels; they have measured speeds instead of a share
    (above). PyTorch's ``scaled_dot_product_attention`` uses FlashAttention 2.

    The host's times are order-of-magnitude estimates, not from a datasheet: an operator call takes
    about 10 µs from Python and half of that from the autograd engine, which is in C++; a kernel
    takes about 2 µs to start and drain. ``locked_share`` is the fraction of a Python call during
    which the thread holds the GIL, which PyTorch releases inside each operator; 0.5 is assumed.
    Threads of one process, such as DataParallel's, wait for each other only for that fraction.

    ``collective_processors`` is the number of multiprocessors that a process group's collective
    takes from concurrent kernels. An NCCL kernel occupies one per channel (NVIDIA/nccl, issue 689):
    24 inside a host of eight H100s, according to NCCL_DEBUG=INFO, and 16 over eight adapters. By
    default, collectives take none. In this model, they never take memory bandwidth.

    ``speed_spread`` is how much arithmetic speed varies among GPUs: the standard deviation of their
    times, divided by the mean. A step waits for the slowest of ``slowest_of`` GPUs, which a cluster
    sets to its world size. By default, all GPUs are equally fast. On 392 V100s in one cluster,
    Longhorn, the spread was 0.016 for matmuls and 0.001 for PageRank, which is memory-bound. (The
    medians of each GPU, without outliers, are from hal-uw/blox-pal, aggregated_data/sim; Sinha et
    al., 2022, Not all GPUs are created equal.)
    """

    spec: GPUSpec
    link: Link = field(default=None)  # type: ignore[assignment]  # by default, the spec's own
    arithmetic_share: float = 0.5
    memory_share: float = 0.8
    link_share: float = 0.8
    network_share: float = 0.8
    python_launch_s: float = 10e-6
    engine_launch_s: float = 5e-6
    kernel_s: float = 2e-6
    locked_share: float = 0.5
    network: Network | None = None  # between hosts; None for a single host
    gpus_per_host: int = 0  # 0 means that all GPUs are on one host
    collective_processors: int = 0
    speed_spread: float = 0.0
    slowest_of: int = 1
    attention: str = "flash 2"  # which kernels: one of vgpu.time.costs.KERNELS
    fuses: bool = False  # whether elementwise chains are fused, as in torch.compile
    # whether matmuls overlap with their own collectives (compiler_passes.py)
    async_tp: bool = False

    def __post_init__(self) -> None:
        for name in _SHARES:
            _check(name, getattr(self, name), "in (0, 1]", lambda share: 0 < share <= 1)
        for name in _SECONDS:
            check_seconds(name, getattr(self, name))
        for name, least in _COUNTS.items():
            check_count(name, getattr(self, name), least)
        spread = self.speed_spread
        _check("speed_spread", spread, "at least 0 and below 1", lambda share: 0 <= share < 1)
        if self.collective_processors >= self.spec.multi_processor_count:
            raise ValueError(
                "collective_processors must be less than the number of multiprocessors of "
                f"{self.spec.name} ({self.spec.multi_processor_count}), "
                f"got {self.collective_processors}"
            )
        if self.attention not in KERNELS:
            raise ValueError(
                f"attention must be one of {', '.join(KERNELS)}, got {self.attention!r}"
            )
        if self.async_tp and not self.fuses:
            raise ValueError(
                "async_tp is a torch.compile pass: it also needs fuses=True, which must be passed "
                "to record()"
            )
        if self.link is None:
            object.__setattr__(self, "link", self.spec.link)

    def changed(self, changes: Mapping[str, Any]) -> "CostModel":
        """Return a copy with some fields changed; fields that have presets accept a preset's name.

        ``gpu`` sets ``spec``. If the link is the old GPU's own, it's replaced by the new
        GPU's own, unless ``link`` is also passed.
        """
        new = dict(changes)
        if "gpu" in new:
            new["spec"] = get_spec(new.pop("gpu"))
        if "link" in new:
            new["link"] = get_link(new["link"])
        elif "spec" in new and self.link == self.spec.link:
            new["link"] = new["spec"].link
        if new.get("network") is not None:
            new["network"] = get_network(new["network"])
        return replace(self, **new)

    def kernel_time_s(self, work: Workload) -> float:
        """Return the seconds that one operation takes on the GPU, including startup and drain."""
        spec, peak = self.spec, self._peak_flop_per_s(work)
        flop_per_s = peak * self.arithmetic_share
        if work.attention is not None and peak > spec.fp32_flop_per_s:
            flop_per_s = attention_flop_per_s(self.attention, spec, work.attention)
        arithmetic_s = work.flop / flop_per_s * self.slowest
        bytes_per_s = spec.memory_bandwidth_bytes_per_s * self.memory_share
        if work.product is None:
            return max(arithmetic_s, work.size_bytes / bytes_per_s) + self.kernel_s
        product_s = product_seconds(
            work.product,
            arithmetic_s,
            (work.size_bytes - work.product.written_bytes) / bytes_per_s,
            bytes_per_s,
            spec.multi_processor_count,
            peak > spec.fp32_flop_per_s,
        )
        return product_s + self.kernel_s

    def _peak_flop_per_s(self, work: Workload) -> float:
        spec = self.spec
        if work.arithmetic == FLOAT16 or (work.arithmetic == BFLOAT16 and spec.has_bfloat16):
            return spec.tensor_flop_per_s
        if work.arithmetic == FLOAT8:
            if spec.fp8_flop_per_s is None:
                raise ValueError(
                    f"{spec.name} can't multiply float8 tensors: its fp8_flop_per_s is None. Use a "
                    "GPU whose tensor cores support float8, such as the H100"
                )
            return spec.fp8_flop_per_s
        if spec.tf32_flop_per_s is not None and work.allows_tf32:
            return spec.tf32_flop_per_s
        return spec.fp32_flop_per_s

    @property
    def slowest(self) -> float:
        """How many times as long arithmetic takes on the slowest GPU as on an average one."""
        if not self.speed_spread:
            return 1.0
        return 1 + self.speed_spread * expected_largest(self.slowest_of)

    @property
    def lost_beside_collectives(self) -> float:
        """The share of its speed that a kernel loses while its GPU runs a collective."""
        return self.collective_processors / self.spec.multi_processor_count

    def launch_s(self, threads: int) -> float:
        """Return the seconds between calls by one thread if ``threads`` threads share a GIL.

        The threads take turns holding the GIL, and do the rest in parallel.
        """
        return self.python_launch_s * max(1.0, threads * self.locked_share)

    def copy_time_s(self, size_bytes: int) -> float:
        """Return the seconds that a copy from one GPU to another takes."""
        return self.collective_time_s("send", size_bytes, 2)

    def host_copy_time_s(self, size_bytes: int) -> float:
        """Return the seconds that a copy between a GPU and its host takes."""
        return self._seconds("send", size_bytes, 2, self.spec.host_link)

    def collective_time_s(self, name: str, size_bytes: float, count: int) -> float:
        """Return the seconds that a collective from table.py takes among ``count`` GPUs."""
        return self._seconds(name, size_bytes, count, self.link)

    def group_time_s(self, name: str, size_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds that a collective takes among these ranks, numbered host by host."""
        hosts = self.hosts_of(ranks)
        if self.network is None or len(hosts) == 1:
            return self.collective_time_s(name, size_bytes, len(ranks))
        inside = min((each for each in hosts.values() if each > 1), default=2)
        route = Route(
            self.link.latency_s,
            self.link.among_bytes_per_s(inside) * self.link_share,
            len(hosts),
            min(hosts.values()),
            max(hosts.values()),
            self.network.latency_s,
            self.network.bytes_per_s_per_gpu(self.gpus_per_host) * self.network_share,
        )
        return collectives.seconds(name, size_bytes, len(ranks), route)

    def link_name(self, ranks: Sequence[int]) -> str:
        """Return the name of the slowest link or network that a collective among ``ranks`` uses."""
        if self.network is None or len(self.hosts_of(ranks)) == 1:
            return self.link.name
        return self.network.name

    def hosts_of(self, ranks: Sequence[int]) -> Counter[int]:
        """Count how many of these ranks are on each host."""
        return Counter(rank // self.gpus_per_host if self.gpus_per_host else 0 for rank in ranks)

    def _seconds(self, name: str, size_bytes: float, count: int, link: Link) -> float:
        route = Route(link.latency_s, link.among_bytes_per_s(count) * self.link_share)
        return collectives.seconds(name, size_bytes, count, route)


@functools.cache
def expected_largest(count: int) -> float:
    """Return the expected maximum of ``count`` independent standard normal variables.

    It's computed as the mean of 2,000 quantiles of the maximum, whose CDF is the normal CDF to the
    power of ``count``.
    """
    largest = ((part + 0.5) / 2000 for part in range(2000))
    normal = statistics.NormalDist()
    return statistics.fmean(normal.inv_cdf(u ** (1 / count)) for u in largest)


def fit_share(time_of: Callable[[float], float], measured_s: float) -> float:
    """Return the share of a peak at which ``time_of(share)`` is ``measured_s``, to within 0.01%.

    Raises ValueError if even the full peak is too slow, or even a thousandth of it is too fast.
    Issues a RuntimeWarning if the time jumps past ``measured_s``, as it does when the order of
    kernels changes.
    """
    low, high = 1e-3, 1.0
    if not time_of(high) <= measured_s <= time_of(low):
        raise ValueError(
            f"no share of the datasheet's peak from {low} to {high} gives {measured_s} s: "
            f"the times at these shares are {time_of(low):.3g} s and {time_of(high):.3g} s"
        )
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if time_of(middle) > measured_s else (low, middle)
    slow_s, fast_s = time_of(low), time_of(high)
    if slow_s - fast_s > 0.005 * measured_s:
        warnings.warn(
            f"no share of the peak gives {measured_s:.4g} s: at {high:.4f} the time jumps from "
            f"{slow_s:.4g} to {fast_s:.4g} s. Predictions with this share may be off by that much",
            RuntimeWarning,
            stacklevel=2,
        )
    return math.sqrt(low * high)
