"""What each GPU model can do, from its maker's datasheet.

The rates are the maker's peaks, which no program reaches: ``CostModel`` says what share of each it
assumes. To add a GPU, add an entry to ``PRESETS``; everything else reads it from there.

``memory_bytes`` takes the datasheet's gigabytes as GiB, which is how boards are built. Left out: the
few hundred MiB that a driver keeps for itself.
"""

from dataclasses import dataclass

from vgpu.hardware.links import LINKS, Link

GIB = 2**30


@dataclass(frozen=True)
class GPUSpec:
    """One GPU as PyTorch sees it (a K80 board holds two).

    FLOP/s of a type are those of dense matrices of it; None where the GPU's tensor cores lack it.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    fp32_flop_per_s: float
    tensor_flop_per_s: float  # float16, and bfloat16 where it has it; fp32's without tensor cores
    multi_processor_count: int
    compute_capability: tuple[int, int]
    source: str
    link: Link = LINKS["PCIe 3"]  # to the other GPUs of such a machine
    host_link: Link = LINKS["PCIe 3"]
    tf32_flop_per_s: float | None = None  # float32 on tensor cores, from the A100 on
    fp8_flop_per_s: float | None = None  # float8 on tensor cores, where they have it

    @property
    def has_bfloat16(self) -> bool:
        """Whether tensor cores take bfloat16 (CUDA programming guide: compute capability 8.0)."""
        return self.compute_capability >= (8, 0)


# Datasheets since the A100 also print twice the rates of tensor cores, for matrices with two zeros in
# each four entries. H100's and H200's print only those: 989 TFLOP/s of TF32, 1979 of float16 and
# bfloat16, 3958 of float8. Compute capabilities are from https://developer.nvidia.com/cuda-gpus.
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
        "multiprocessors: 2496 cores of 192 each",
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
    "H100": GPUSpec(
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
    ),
    "H200": GPUSpec(
        name="Virtual H200",
        memory_bytes=141 * GIB,
        memory_bandwidth_bytes_per_s=4.8e12,
        fp32_flop_per_s=67e12,
        tensor_flop_per_s=989e12,
        multi_processor_count=132,
        compute_capability=(9, 0),
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM column; multiprocessors: NVIDIA H100 "
        "whitepaper",
        link=LINKS["NVLink 4"],
        host_link=LINKS["PCIe 5"],
        tf32_flop_per_s=494.5e12,
        fp8_flop_per_s=1979e12,
    ),
}


def get_spec(gpu: str | GPUSpec) -> GPUSpec:
    """A preset by name, or the given spec itself; ValueError names the presets there are."""
    if isinstance(gpu, GPUSpec):
        return gpu
    if gpu not in PRESETS:
        raise ValueError(f"no GPU preset {gpu!r}; there are {', '.join(PRESETS)}")
    return PRESETS[gpu]
