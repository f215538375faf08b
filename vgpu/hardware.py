"""GPUs, links and networks from datasheets, and how well a matmul fills a GPU.

To add a GPU, link or network, add an entry to ``PRESETS``, ``LINKS`` or ``NETWORKS``; everything
else reads it from there. The rates are the manufacturers' peaks, which no program reaches:
``CostModel`` says what fraction of each it assumes.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_Preset = TypeVar("_Preset")


def _check_numbers(described: Any) -> None:
    """Raise ValueError for a rate or size that isn't a number above 0; a latency may be 0."""
    for field in fields(described):
        value, is_latency = getattr(described, field.name), field.name == "latency_s"
        if field.type not in (int, float, int | None, float | None) or value is None:
            continue
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not (value > 0 or (is_latency and value == 0)):
            raise ValueError(
                f"{field.name} of {described.name!r} must be a number "
                f"{'of at least' if is_latency else 'above'} 0, got {value!r}"
            )


# Links and networks. Rates are for one direction, without protocol overhead; both directions work
# at once.


@dataclass(frozen=True)
class Link:
    """A GPU's links to other GPUs or to its host, in one direction.

    A GPU's total rate over all of its links and its rate to a single other GPU are separate
    numbers. Since the A100, NVSwitch lets any pair use all of both GPUs' links. In a DGX-1, the
    links are point-to-point. A P100's four links lead to four neighbors. At most two of a V100's
    six links lead to the same GPU, and some pairs have none.
    """

    name: str
    bandwidth_bytes_per_s: float  # all links of the GPU together
    latency_s: float
    source: str
    pair_bytes_per_s: float | None = None  # between two GPUs; None means all links

    def __post_init__(self) -> None:
        _check_numbers(self)

    def among_bytes_per_s(self, count: int) -> float:
        """Return the rate at which one of ``count`` GPUs can send to the others, over all links."""
        if self.pair_bytes_per_s is None:
            return self.bandwidth_bytes_per_s
        return min(self.bandwidth_bytes_per_s, (count - 1) * self.pair_bytes_per_s)


@dataclass(frozen=True)
class Network:
    """The network adapters of one host, in one direction.

    Not modeled: oversubscribed switches, other jobs' traffic, and colliding routes. Because of
    these, clusters stay below what their adapters allow: the Ultra-Scale Playbook (2025) measured
    an all-reduce of 256 MB on H100s at 362, 160 and 33 GB/s per GPU over 2, 4 and 64 hosts, where
    the adapters allow 400.
    """

    name: str
    adapter_bytes_per_s: float
    latency_s: float  # for one step from host to host
    source: str
    adapters_per_host: int | None = None  # None means one per GPU

    def __post_init__(self) -> None:
        _check_numbers(self)

    def bytes_per_s_per_gpu(self, gpus_per_host: int) -> float:
        """Return a GPU's share of its host's adapters, if all GPUs of the host send at once."""
        adapters = gpus_per_host if self.adapters_per_host is None else self.adapters_per_host
        return adapters * self.adapter_bytes_per_s / gpus_per_host


def _pcie(generation: int, transfers_per_s: float, coding: float) -> Link:
    return Link(
        name=f"PCIe {generation}.0 x16",
        bandwidth_bytes_per_s=16 * transfers_per_s * coding / 8,
        latency_s=10e-6,
        source=f"PCI-SIG, PCI Express base specification {generation}.0",
    )


# Sources: PCI-SIG base specifications (16 lanes, 8b/10b coding in generation 2 and 128b/130b after
# it), and NVIDIA's datasheets and whitepapers for NVLink, which give the sum of both directions;
# the rates here are half of that. A copy's fixed cost of about 10 µs (PCIe) or 5 µs (NVLink) isn't
# from a datasheet: it's the order of magnitude that p2pBandwidthLatencyTest from NVIDIA's CUDA
# samples prints on such machines.
LINKS: dict[str, Link] = {
    "PCIe 2": _pcie(2, 5e9, 8 / 10),
    "PCIe 3": _pcie(3, 8e9, 128 / 130),
    "PCIe 4": _pcie(4, 16e9, 128 / 130),
    "PCIe 5": _pcie(5, 32e9, 128 / 130),
    # Without peer access, a copy goes to the host's memory first, and from there to the other GPU.
    "PCIe 3 via host": Link(
        "PCIe 3.0 x16 via the host",
        16 * 8e9 * 128 / 130 / 8 / 2,
        20e-6,
        "same as PCIe 3, but with two copies, one after the other",
    ),
    "NVLink 1": Link(
        "NVLink 1 (4 links)", 80e9, 5e-6, "NVIDIA Tesla P100 whitepaper", pair_bytes_per_s=20e9
    ),
    "NVLink 2": Link(
        "NVLink 2 (6 links)", 150e9, 5e-6, "NVIDIA Tesla V100 whitepaper", pair_bytes_per_s=50e9
    ),
    "NVLink 3": Link("NVLink 3 (12 links)", 300e9, 5e-6, "NVIDIA A100 whitepaper"),
    "NVLink 4": Link("NVLink 4 (18 links)", 450e9, 5e-6, "NVIDIA H100 whitepaper"),
    "NVLink 5": Link("NVLink 5 (18 links)", 900e9, 5e-6, "NVIDIA Blackwell datasheet"),
    "NVLink-C2C": Link("NVLink-C2C", 450e9, 5e-6, "NVIDIA GB200 NVL72 datasheet"),  # to Grace
    # Each of eight GPUs has its own link to each of the other seven.
    "Infinity Fabric 4": Link(
        "Infinity Fabric 4 (7 links)",
        448e9,
        5e-6,
        "AMD Instinct MI300X platform data sheet",
        pair_bytes_per_s=64e9,
    ),
}


def _gbit(gigabits_per_s: float) -> float:
    return gigabits_per_s * 1e9 / 8


# InfiniBand's and RoCE's latencies are those of one step of a ring over the network in NCCL's own
# model (src/graph/tuning.cc, ring, LL128: 4 µs). EFA's and TCP's are assumed: about four and ten
# times that.
_INFINIBAND = "InfiniBand Trade Association roadmap, four lanes"

NETWORKS: dict[str, Network] = {
    "InfiniBand EDR": Network("InfiniBand EDR", _gbit(100), 4e-6, _INFINIBAND),
    "InfiniBand HDR": Network("InfiniBand HDR", _gbit(200), 4e-6, _INFINIBAND),
    "InfiniBand NDR": Network("InfiniBand NDR", _gbit(400), 4e-6, _INFINIBAND),
    "RoCE 400": Network("RoCE, 400 Gb/s Ethernet", _gbit(400), 4e-6, "IEEE 802.3bs"),
    "EFA p4d": Network(
        "EFA of a p4d.24xlarge", _gbit(100), 15e-6, "AWS EC2 P4d: 400 Gb/s per host", 4
    ),
    "EFA p5": Network(
        "EFA of a p5.48xlarge", _gbit(100), 15e-6, "AWS EC2 P5: 3200 Gb/s per host", 32
    ),
    "Ethernet 25": Network("Ethernet, 25 Gb/s, TCP", _gbit(25), 50e-6, "IEEE 802.3by", 1),
    "Ethernet 100": Network("Ethernet, 100 Gb/s, TCP", _gbit(100), 50e-6, "IEEE 802.3ba", 1),
}


# GPUs

GIB = 2**30


@dataclass(frozen=True)
class GPUSpec:
    """One GPU as PyTorch sees it (a K80 board holds two).

    ``memory_bytes`` treats the datasheet's gigabytes as GiB, which is how boards are built, and
    ignores the few hundred MiB that the driver reserves.

    The FLOP/s for a dtype hold for dense matrices; None if the GPU's tensor cores don't support it.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    fp32_flop_per_s: float
    tensor_flop_per_s: float  # float16, and bfloat16 if supported; without tensor cores, fp32's
    multi_processor_count: int
    compute_capability: tuple[int, int]
    source: str
    link: Link = LINKS["PCIe 3"]  # to the machine's other GPUs
    host_link: Link = LINKS["PCIe 3"]
    tf32_flop_per_s: float | None = None  # float32 on tensor cores, since the A100
    fp8_flop_per_s: float | None = None  # float8 on tensor cores, if supported

    def __post_init__(self) -> None:
        _check_numbers(self)
        object.__setattr__(self, "compute_capability", tuple(self.compute_capability))

    @property
    def has_bfloat16(self) -> bool:
        """Whether tensor cores support bfloat16.

        According to the CUDA programming guide, they do from compute capability 8.0 on.
        """
        return self.compute_capability >= (8, 0)


# Since the A100, datasheets also give doubled rates for the tensor cores, for matrices with two
# zeros in every four entries. The H100's and H200's datasheets give only these sparse rates: 989
# TFLOP/s for TF32, 1979 for float16 and bfloat16, 3958 for float8. Blackwell's datasheets do the
# same, and some give totals for all GPUs of a board or a rack. Compute capabilities are from
# https://developer.nvidia.com/cuda-gpus.
_HOPPER = GPUSpec(
    name="Virtual H100 80GB HBM3",
    memory_bytes=80 * GIB,
    memory_bandwidth_bytes_per_s=3.35e12,
    fp32_flop_per_s=67e12,
    tensor_flop_per_s=989e12,
    multi_processor_count=132,
    compute_capability=(9, 0),
    source="NVIDIA H100 Tensor Core GPU datasheet, SXM column; multiprocessors: NVIDIA H100 "
    "whitepaper",
    link=LINKS["NVLink 4"],
    host_link=LINKS["PCIe 5"],
    tf32_flop_per_s=494.5e12,
    fp8_flop_per_s=1979e12,
)
_BLACKWELL = GPUSpec(
    name="Virtual B200",
    memory_bytes=180 * GIB,
    memory_bandwidth_bytes_per_s=7.7e12,
    fp32_flop_per_s=75e12,
    tensor_flop_per_s=2250e12,
    multi_processor_count=148,
    compute_capability=(10, 0),
    source="NVIDIA Blackwell datasheet, HGX B200, individual GPU: half of the sparse rates; TF32: "
    "half of float16's rate before rounding; multiprocessors: 74 on each of two dies (Chips and "
    "Cheese, 2025, Nvidia's B200)",
    link=LINKS["NVLink 5"],
    host_link=LINKS["PCIe 5"],
    tf32_flop_per_s=1125e12,
    fp8_flop_per_s=4500e12,
)
PRESETS: dict[str, GPUSpec] = {
    "K80": GPUSpec(
        name="Virtual Tesla K80",
        memory_bytes=12 * GIB,
        memory_bandwidth_bytes_per_s=240e9,
        fp32_flop_per_s=4.37e12,
        tensor_flop_per_s=4.37e12,
        multi_processor_count=13,
        compute_capability=(3, 7),
        source="NVIDIA Tesla K80 board specification BD-07317-001: half a board, GPU boost clock; "
        "multiprocessors: 2496 cores, 192 in each",
    ),
    "V100": GPUSpec(
        name="Virtual Tesla V100-SXM2-16GB",
        memory_bytes=16 * GIB,
        memory_bandwidth_bytes_per_s=900e9,
        fp32_flop_per_s=15.7e12,
        tensor_flop_per_s=125e12,
        multi_processor_count=80,
        compute_capability=(7, 0),
        source="NVIDIA V100 Tensor Core GPU datasheet, SXM2 column; multiprocessors: NVIDIA Tesla "
        "V100 whitepaper WP-08608-001",
        link=LINKS["NVLink 2"],
        host_link=LINKS["PCIe 3"],
    ),
    "A100": GPUSpec(
        name="Virtual A100-SXM4-40GB",
        memory_bytes=40 * GIB,
        memory_bandwidth_bytes_per_s=1555e9,
        fp32_flop_per_s=19.5e12,
        tensor_flop_per_s=312e12,
        multi_processor_count=108,
        compute_capability=(8, 0),
        source="NVIDIA A100 Tensor Core GPU datasheet, 40 GB SXM column; multiprocessors: NVIDIA "
        "A100 whitepaper",
        link=LINKS["NVLink 3"],
        host_link=LINKS["PCIe 4"],
        tf32_flop_per_s=156e12,
    ),
    "H100": _HOPPER,
    "H200": replace(
        _HOPPER,
        name="Virtual H200",
        memory_bytes=141 * GIB,
        memory_bandwidth_bytes_per_s=4.8e12,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM column; multiprocessors: NVIDIA H100 "
        "whitepaper",
    ),
    "B200": _BLACKWELL,
    "GB200": replace(
        _BLACKWELL,
        name="Virtual GB200",
        memory_bytes=186 * GIB,
        memory_bandwidth_bytes_per_s=8e12,
        fp32_flop_per_s=80e12,
        tensor_flop_per_s=2500e12,
        multi_processor_count=152,
        source="NVIDIA Blackwell datasheet, GB200 NVL72, individual GPU: half of the sparse rates; "
        "multiprocessors: as reported by CUDA, which fits 80 TFLOP/s in float32 at 2.06 GHz",
        host_link=LINKS["NVLink-C2C"],
        tf32_flop_per_s=1250e12,
        fp8_flop_per_s=5000e12,
    ),
    "MI300X": GPUSpec(
        name="Virtual MI300X",
        memory_bytes=192 * GIB,
        memory_bandwidth_bytes_per_s=5.3e12,
        fp32_flop_per_s=163.4e12,
        tensor_flop_per_s=1307.4e12,
        multi_processor_count=304,
        compute_capability=(9, 4),
        source="AMD Instinct MI300X data sheet, dense, peak engine clock 2100 MHz; AMD's ROCm "
        "documentation (MI300 series microarchitecture) gives the same rates as FLOPs per clock "
        "for each of 304 compute units, which count as multiprocessors here: float32 256, TF32 "
        "1024, float16 2048, float8 4096; PyTorch reports gfx942 as (9, 4)",
        link=LINKS["Infinity Fabric 4"],
        host_link=LINKS["PCIe 5"],
        tf32_flop_per_s=653.7e12,
        fp8_flop_per_s=2614.9e12,
    ),
}


def get_spec(gpu: str | GPUSpec) -> GPUSpec:
    """Return a preset by name, a GPU from a TOML file by path, or ``gpu`` itself if it's a spec.

    Raises a ValueError that lists the presets, or says what's wrong with the file.
    """
    return _get(GPUSpec, PRESETS, gpu)


def get_link(link: str | Link) -> Link:
    """Like ``get_spec``, but for links."""
    return _get(Link, LINKS, link)


def get_network(network: str | Network) -> Network:
    """Like ``get_spec``, but for networks."""
    return _get(Network, NETWORKS, network)


def _get(kind: type[_Preset], presets: Mapping[str, _Preset], wanted: str | _Preset) -> _Preset:
    if not isinstance(wanted, str):
        return wanted
    if wanted.endswith(".toml"):
        return _read(kind, presets, Path(wanted))
    if wanted not in presets:
        name = kind.__name__.removesuffix("Spec")
        raise ValueError(
            f"no {name if name == 'GPU' else name.lower()} preset {wanted!r}: use one of "
            f"{', '.join(presets)}, or a path that ends in .toml"
        )
    return presets[wanted]


def _read(kind: type[_Preset], presets: Mapping[str, _Preset], path: Path) -> _Preset:
    """Read an object from a file; ``like`` names a preset for the fields that the file lacks."""
    try:
        given: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        base = vars(_get(kind, presets, given.pop("like"))) if "like" in given else {}
        for name in ("link", "host_link"):
            if isinstance(given.get(name), dict):
                given[name] = Link(**{"source": f"{path}"} | given[name])
            elif name in given:
                given[name] = get_link(given[name])
        return kind(**{**base, "source": f"{path}", **given})
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except (TypeError, ValueError) as error:  # Python names the missing or unknown fields
        text = f"{error}".replace(f"{kind.__name__}.__init__() ", "")
        text = text.replace("keyword argument", "field").replace(
            "required positional arguments", "fields"
        )
        raise ValueError(f"{path} doesn't describe a {kind.__name__}: {text}") from error


# How well a matmul fills a GPU


class Product(NamedTuple):
    """A matmul of (batch, rows, inner) by (batch, inner, columns)."""

    batch: int
    rows: int
    inner: int
    columns: int
    written_bytes: int  # of the result


# Tile sizes from cublasLtMatmulTile_t, in both orientations.
_SIDES = ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32))
TILES = sorted({tile for sides in _SIDES for tile in (sides, sides[::-1])}, reverse=True)

# The L2 cache can feed an A100's tensor cores if they do at least 43 FLOPs per byte, and a V100's if
# they do at least 40 (312 and 125 TFLOP/s; 7.2 and 3.1 TB/s, which is 5120 and 2048 bytes per clock:
# NVIDIA A100 whitepaper). The same is assumed for other GPUs; float32 units need a tenth of that.
_FLOP_PER_BYTE = 43

_STEP = 64  # the smallest part of a sum: how many terms 16-bit kernels process at once


def product_seconds(
    product: Product,
    arithmetic_s: float,
    read_s: float,
    bytes_per_s: float,
    multi_processors: int,
    on_tensor_cores: bool,
) -> float:
    """Return the time of a matmul with the best tile size; each thread block computes one tile.

    Tiles at the edges compute values that aren't needed, and the last wave takes as long as a full
    one. A tile is first accumulated, then written, and its multiprocessor computes nothing while it
    writes: the longer the sums, the less that matters. Smaller tiles fill a GPU better, but read
    more per FLOP. If there are too few tiles, each sum is split into parts (split-K), which are
    written as float32 and added.

    ``arithmetic_s`` is the time with all multiprocessors busy from start to finish, and ``read_s``
    the time to read the operands from memory. Sums must not be empty. Not modeled: multiple tiles
    at once on a multiprocessor, thread block clusters, blocks that write one tile while they
    compute the next (CUTLASS's ping-pong kernels on Hopper), and sizes that aren't a multiple of 16
    bytes.

    Source: NVIDIA, Matrix Multiplication Background User's Guide.
    """
    batch, rows, inner, columns, written_bytes = product
    elements = batch * rows * columns
    element_s = arithmetic_s * multi_processors / elements  # on one multiprocessor

    def all_times() -> Iterator[float]:
        for height, width in TILES:
            height, width = min(height, rows), min(width, columns)
            tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
            speed = min(1.0, height * width / (height + width) / _FLOP_PER_BYTE)
            tile_s = height * width * element_s / (speed if on_tensor_cores else 1.0)
            for parts in {1, min(multi_processors // tiles, inner // _STEP)} - {0}:
                waves = math.ceil(tiles * parts / multi_processors)
                added_bytes = 0 if parts == 1 else 2 * 4 * parts * elements
                busy_s = max(waves * tile_s / parts, read_s)
                yield busy_s + (written_bytes + added_bytes) / bytes_per_s

    return min(all_times())
