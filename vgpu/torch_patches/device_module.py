"""``torch.vgpu``: what ``torch.cuda`` users reach for. This module itself is registered with torch.

Where ``device`` is None it means the current device, as in ``torch.cuda``.
"""

import uuid
from typing import Any

import torch

from vgpu.hardware.specs import GPUSpec
from vgpu.memory import gpus
from vgpu.memory.gpus import current_index as current_device
from vgpu.memory.gpus import device_count, meant_by
from vgpu.time import recording
from vgpu.time.streams import Event, Stream, current_stream, default_stream, set_stream
from vgpu.torch_patches.submodules import amp, memory, missing, nvtx, random
from vgpu.torch_patches.submodules.memory import (
    empty_cache,
    get_per_process_memory_fraction,
    ipc_collect,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from vgpu.torch_patches.submodules.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)

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
    "memory",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "nvtx",
    "random",
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


def set_device(device: Any) -> None:
    """Make a device current; a negative index changes nothing."""
    if isinstance(device, int) and device < 0:
        return
    gpus.exchange_index(meant_by(device).index)


class device:
    """Makes a device current while the block runs; None or a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        changes_nothing = device is None or (isinstance(device, int) and device < 0)
        self.index = -1 if changes_nothing else meant_by(device).index

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
    gpu, now = meant_by(device), recording.under_way
    if now is not None:
        now.synchronize(now.recorder.streams_of(gpu))


def get_device_name(device: Any = None) -> str:
    return meant_by(device).spec.name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return meant_by(device).spec.compute_capability


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: the arithmetic is the CPU's, which has bfloat16."""
    return True


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """True for two different GPUs: copies go straight from one to the other."""
    return meant_by(device) is not meant_by(peer_device)


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
    gpu = meant_by(device)
    return DeviceProperties(gpu.index, gpu.spec, gpu.memory.capacity_bytes)


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


__getattr__ = missing.of("")
