"""``torch.vgpu.memory``: bytes that are allocated, reserved and left."""

from typing import Any

from vgpu.memory import gpus
from vgpu.memory.gpus import meant_by
from vgpu.torch_patches.submodules import missing

__all__ = [
    "empty_cache",
    "get_per_process_memory_fraction",
    "ipc_collect",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]


def memory_allocated(device: Any = None) -> int:
    """Bytes in live blocks, each rounded up to 512."""
    return meant_by(device).memory.settled().allocated_bytes


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes since the start or the last ``reset_peak_memory_stats``."""
    return meant_by(device).memory.settled().peak_bytes


def memory_reserved(device: Any = None) -> int:
    """Bytes of the segments that CUDA's caching allocator would hold for what was allocated."""
    return meant_by(device).memory.settled().reserved()[0]


def max_memory_reserved(device: Any = None) -> int:
    """The most of them since the start or the last ``reset_peak_memory_stats``."""
    return meant_by(device).memory.settled().reserved()[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    meant_by(device).memory.settled().reset_peak()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Let this process allocate no more than this share of a GPU's memory; from 0 to 1."""
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    memory = meant_by(device).memory
    memory.allowed_bytes = int(fraction * memory.capacity_bytes) if fraction < 1 else None


def get_per_process_memory_fraction(device: Any = None) -> float:
    """The share that this process may allocate; 1 where nothing was set."""
    memory = meant_by(device).memory
    if memory.allowed_bytes is None:
        return 1.0
    return memory.allowed_bytes / memory.capacity_bytes


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are not reserved, and total bytes."""
    memory = meant_by(device).memory.settled()
    return memory.free_bytes, memory.capacity_bytes


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes now and at the peak, ``allocated_bytes.all.peak`` and the like; how often room was short.

    What is allocated is all that is active: no block waits here until another stream has got to it.
    """
    memory = meant_by(device).memory.settled()
    allocated = memory.allocated_bytes, memory.peak_bytes
    kinds = {
        "active_bytes": allocated,
        "allocated_bytes": allocated,
        "reserved_bytes": memory.reserved(),
    }
    stats: dict[str, int] = {}
    for name, (current, peak) in kinds.items():
        stats |= {f"{name}.all.current": current, f"{name}.all.peak": peak}
    return stats | {"num_alloc_retries": memory.retries, "num_ooms": memory.out_of_memory_count}


def empty_cache() -> None:
    """Give back segments that are reserved and in which nothing is allocated, on all GPUs."""
    for index in range(gpus.device_count()):
        gpus.by_index(index).memory.empty_cache()


def ipc_collect() -> None:
    """Nothing to release: memory shared with another process goes with its last reference."""


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """A small table of a device's bytes and blocks."""
    return meant_by(device).memory.settled().summary()


__getattr__ = missing.of("memory")
