"""``torch.vgpu``: what ``torch.cuda`` users reach for. This module itself is registered with torch.

Where ``device`` is None it means the current device, as in ``torch.cuda``.
"""

import uuid
from collections.abc import Iterable
from typing import Any

import torch

from helpers.vgpu.device import generators, gpus
from helpers.vgpu.device.gpus import current_index as current_device
from helpers.vgpu.device.gpus import device_count
from helpers.vgpu.device.specs import GPUSpec
from helpers.vgpu.timing import recording
from helpers.vgpu.timing.streams import Event, Stream, current_stream, default_stream, set_stream
from helpers.vgpu.torch_api import amp

__all__ = [
    "Event",
    "OutOfMemoryError",
    "Stream",
    "amp",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]


# torch.utils.checkpoint saves the state of the generators where it finds this mark.
_initialized = True

OutOfMemoryError = torch.OutOfMemoryError


def is_available() -> bool:
    return gpus.device_count() > 0


def is_initialized() -> bool:
    """False until a device is chosen or used; DeviceMesh then takes the one of LOCAL_RANK."""
    return is_available() and gpus.in_use.has_begun


def init() -> None:
    """Nothing to prepare."""


def _gpu(device: Any) -> gpus.VirtualGPU:
    """The GPU that an int, a string, a torch.device or None (the current one) means."""
    if device is None:
        return gpus.by_index(gpus.current_index())
    if isinstance(device, int):
        return gpus.by_index(device)
    gpu = gpus.resolve(torch.device(device))
    if gpu is None:
        raise ValueError(f"Expected a {gpus.DEVICE_TYPE} device, but got: {device}")
    return gpu


def set_device(device: Any) -> None:
    """Make a device current; a negative index changes nothing."""
    if isinstance(device, int) and device < 0:
        return
    gpus.exchange_index(_gpu(device).index)


class device:
    """Makes a device current while the block runs; None or a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        changes_nothing = device is None or (isinstance(device, int) and device < 0)
        self.index = -1 if changes_nothing else _gpu(device).index

    def __enter__(self) -> None:
        self._before = gpus.exchange_index(self.index)

    def __exit__(self, *exc_info: object) -> None:
        gpus.exchange_index(self._before)


class device_of(device):
    """Makes a tensor's device current while the block runs; nothing for tensors elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == gpus.DEVICE_TYPE else -1)


def stream(stream: Stream | None) -> Any:
    """A context that makes ``stream`` and its device current; None changes nothing."""
    return device(None) if stream is None else stream


def synchronize(device: Any = None) -> None:
    """Wait for all work on a device; in a recording of virtual time the host waits."""
    gpu, now = _gpu(device), recording.under_way
    if now is not None:
        now.synchronize(now.clock.streams_of(gpu))


def get_device_name(device: Any = None) -> str:
    return _gpu(device).spec.name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return _gpu(device).spec.compute_capability


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: the arithmetic is the CPU's, which has bfloat16."""
    return True


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """True for two different GPUs: copies go straight from one to the other."""
    return _gpu(device) is not _gpu(peer_device)


class DeviceProperties:
    """The fields of ``torch.cuda.get_device_properties`` that a virtual GPU has."""

    def __init__(self, index: int, spec: GPUSpec, total_memory: int) -> None:
        self.name = spec.name
        self.uuid = uuid.uuid5(uuid.NAMESPACE_OID, f"{gpus.DEVICE_TYPE}:{index}")
        self.total_memory = total_memory
        self.multi_processor_count = spec.multi_processor_count
        self.major, self.minor = spec.compute_capability

    def __repr__(self) -> str:
        return (
            f"_VgpuDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )


def get_device_properties(device: Any = None) -> DeviceProperties:
    gpu = _gpu(device)
    return DeviceProperties(gpu.index, gpu.spec, gpu.memory.capacity_bytes)


def memory_allocated(device: Any = None) -> int:
    """Bytes in live blocks, each rounded up to 512."""
    return _gpu(device).memory.settled().allocated_bytes


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes since the start or the last ``reset_peak_memory_stats``."""
    return _gpu(device).memory.settled().peak_bytes


def memory_reserved(device: Any = None) -> int:
    """Bytes of the segments that CUDA's caching allocator would hold for what was allocated."""
    return _gpu(device).memory.settled().reserved()[0]


def max_memory_reserved(device: Any = None) -> int:
    """The most of them since the start or the last ``reset_peak_memory_stats``."""
    return _gpu(device).memory.settled().reserved()[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    _gpu(device).memory.settled().reset_peak()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Let this process allocate no more than this share of a GPU's memory; from 0 to 1."""
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    memory = _gpu(device).memory
    memory.allowed_bytes = int(fraction * memory.capacity_bytes) if fraction < 1 else None


def get_per_process_memory_fraction(device: Any = None) -> float:
    """The share that this process may allocate; 1 where nothing was set."""
    memory = _gpu(device).memory
    if memory.allowed_bytes is None:
        return 1.0
    return memory.allowed_bytes / memory.capacity_bytes


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are not reserved, and total bytes."""
    memory = _gpu(device).memory.settled()
    return memory.free_bytes, memory.capacity_bytes


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes now and at the peak, ``allocated_bytes.all.peak`` and the like; how often room was short.

    What is allocated is all that is active: no block waits here until another stream has got to it.
    """
    memory = _gpu(device).memory.settled()
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
    return _gpu(device).memory.settled().summary()


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    generators.default_generator(_gpu(None)).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator alike; ``torch.manual_seed`` calls it."""
    for index in range(gpus.device_count()):
        generators.default_generator(gpus.by_index(index)).manual_seed(seed)


def seed() -> None:
    """Seed the current device's generator at random."""
    generators.default_generator(_gpu(None)).seed()


def seed_all() -> None:
    """Seed every device's generator at random, all alike."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return generators.default_generator(_gpu(None)).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of a device's generator, as a byte tensor on the CPU."""
    return generators.default_generator(_gpu(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    generators.default_generator(_gpu(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(gpus.device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]
