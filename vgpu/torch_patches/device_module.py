"""``torch.vgpu``, the counterpart of ``torch.cuda``. This module itself is registered with torch.

A ``device`` of None means the current device, as in ``torch.cuda``. Some names are imported from
the files that implement them. The modules ``torch.vgpu.amp``, ``memory``, ``nvtx`` and ``random``
are created at the end of this file.
"""

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from vgpu.hardware import GPUSpec
from vgpu.memory import gpus, snapshot
from vgpu.memory.blocks import DeviceMemory
from vgpu.memory.gpus import current_index as current_device  # noqa: F401
from vgpu.memory.gpus import device_count, meant_by  # noqa: F401
from vgpu.time import recording
from vgpu.time.streams import Event, Stream, current_stream, default_stream, set_stream  # noqa: F401

# Devices

# torch.utils.checkpoint saves the generators' states if this is set.
_initialized = True

OutOfMemoryError = torch.OutOfMemoryError


def is_available() -> bool:
    return gpus.device_count() > 0


def is_initialized() -> bool:
    """Return False until a device is chosen or used.

    Before that, DeviceMesh makes LOCAL_RANK's device current.
    """
    return is_available() and gpus.in_use.has_begun


def init() -> None:
    """Do nothing: no initialization is needed."""


def set_device(device: Any) -> None:
    """Make a device current; a negative index changes nothing."""
    if isinstance(device, int) and device < 0:
        return
    gpus.exchange_index(meant_by(device).index)


class device:
    """Context manager that makes a device current; None or a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        changes_nothing = device is None or (isinstance(device, int) and device < 0)
        self.index = -1 if changes_nothing else meant_by(device).index

    def __enter__(self) -> None:
        self._before = gpus.exchange_index(self.index)

    def __exit__(self, *exc_info: object) -> None:
        gpus.exchange_index(self._before)


class device_of(device):
    """Context manager that makes a tensor's device current if that's a virtual GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == gpus.DEVICE_TYPE else -1)


def stream(stream: Stream | None) -> Any:
    """Return a context manager that makes a stream and its device current; None changes nothing."""
    return device(None) if stream is None else stream


def synchronize(device: Any = None) -> None:
    """Wait for all work on a device; in a recording, the host waits in virtual time."""
    gpu, now = meant_by(device), recording.under_way
    if now is not None:
        now.program.synchronize(now.program.streams_of(gpu))


def get_device_name(device: Any = None) -> str:
    return meant_by(device).spec.name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return meant_by(device).spec.compute_capability


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True, because the CPU does the arithmetic and supports bfloat16."""
    return True


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Return True for two different GPUs: copies go directly from one to the other."""
    return meant_by(device) is not meant_by(peer_device)


class DeviceProperties:
    """The properties from ``torch.cuda.get_device_properties`` that a virtual GPU has."""

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


# Memory


def _memory_of(device: Any) -> DeviceMemory:
    return meant_by(device).memory.settled()


def memory_allocated(device: Any = None) -> int:
    """Return the bytes in live blocks, each rounded up to a multiple of 512."""
    return _memory_of(device).allocated_bytes


def max_memory_allocated(device: Any = None) -> int:
    """Return the peak of allocated bytes since the start or since ``reset_peak_memory_stats``."""
    return _memory_of(device).peak_bytes


def memory_reserved(device: Any = None) -> int:
    """Return the bytes of the segments that CUDA's caching allocator would hold."""
    return _memory_of(device).reserved()[0]


def max_memory_reserved(device: Any = None) -> int:
    """Return the peak of reserved bytes since the start or since ``reset_peak_memory_stats``."""
    return _memory_of(device).reserved()[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    _memory_of(device).reset_peak()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limit this process to a fraction of a GPU's memory, from 0 to 1."""
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    memory = meant_by(device).memory
    memory.allowed_bytes = int(fraction * memory.capacity_bytes) if fraction < 1 else None


def get_per_process_memory_fraction(device: Any = None) -> float:
    """Return the fraction of a GPU's memory that this process may allocate; 1 unless it was set."""
    memory = meant_by(device).memory
    if memory.allowed_bytes is None:
        return 1.0
    return memory.allowed_bytes / memory.capacity_bytes


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the bytes that aren't reserved, and the total bytes."""
    memory = _memory_of(device)
    return memory.free_bytes, memory.capacity_bytes


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return current and peak bytes (``allocated_bytes.all.peak`` and so on), retries and errors.

    Active bytes equal allocated bytes: here, no freed block has to wait for another stream.
    Requested bytes are those before each block is rounded up to a multiple of 512.
    """
    memory = _memory_of(device)
    allocated = memory.allocated_bytes, memory.peak_bytes
    kinds = {
        "active_bytes": allocated,
        "allocated_bytes": allocated,
        "requested_bytes": (memory.requested_bytes, memory.peak_requested_bytes),
        "reserved_bytes": memory.reserved(),
    }
    stats: dict[str, int] = {}
    for name, (current, peak) in kinds.items():
        stats |= {f"{name}.all.current": current, f"{name}.all.peak": peak}
    return stats | {"num_alloc_retries": memory.retries, "num_ooms": memory.out_of_memory_count}


def empty_cache() -> None:
    """Release reserved segments without allocated blocks on all GPUs."""
    for index in range(gpus.device_count()):
        gpus.by_index(index).memory.empty_cache()


def ipc_collect() -> None:
    """Do nothing: memory shared with another process is freed with its last reference."""


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return ``memory_stats`` as text, one per line."""
    return "\n".join(f"{name}: {value:,}" for name, value in memory_stats(device).items())


# Random numbers


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    gpus.default_generator(meant_by(None)).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices' generators with the same seed; ``torch.manual_seed`` calls this."""
    for index in range(gpus.device_count()):
        gpus.default_generator(gpus.by_index(index)).manual_seed(seed)


def seed() -> None:
    """Seed the current device's generator with a random seed."""
    gpus.default_generator(meant_by(None)).seed()


def seed_all() -> None:
    """Seed all devices' generators with the same random seed."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return gpus.default_generator(meant_by(None)).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of a device's generator, as a byte tensor on the CPU."""
    return gpus.default_generator(meant_by(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    gpus.default_generator(meant_by(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(gpus.device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# torch.vgpu.amp: the older names for automatic mixed precision


class _Autocast(torch.amp.autocast):
    """``torch.autocast("vgpu")``; the default dtype is float16."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__(gpus.DEVICE_TYPE, dtype, enabled, cache_enabled)


class _GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("vgpu")``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(gpus.DEVICE_TYPE, *args, **kwargs)


# torch.vgpu.nvtx: markers for NVIDIA's profilers, no-ops here


def _marker(*args: object, **kwargs: object) -> int:
    """Do nothing; return 0 in place of the depth or handle that torch.cuda.nvtx returns."""
    return 0


@contextlib.contextmanager
def _range(*args: object, **kwargs: object) -> Iterator[None]:
    """Do nothing around a ``with`` block or a decorated function."""
    yield


# The modules, and names that only torch.cuda has


def _missing_in(submodule: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``torch.vgpu``, or of its submodule with this name."""
    inside = f".{submodule}" if submodule else ""
    ours, theirs = f"torch.{gpus.DEVICE_TYPE}{inside}", f"torch.cuda{inside}"

    def __getattr__(name: str) -> Any:
        there = getattr(torch.cuda, submodule) if submodule else torch.cuda
        if name.startswith("__") or name not in dir(there):
            raise AttributeError(f"module '{ours}' has no attribute '{name}'")
        advice = f"skip it if hasattr({ours}, '{name}') is False"
        if name.endswith("Tensor"):  # torch.cuda.FloatTensor and the like, in old programs
            advice = (
                "create tensors with dtype= and device=, or "
                f"torch.set_default_device('{gpus.DEVICE_TYPE}')"
            )
        raise AttributeError(
            f"module '{ours}' has no attribute '{name}': {theirs} has it, but virtual GPUs have "
            f"nothing like it; {advice}"
        )

    return __getattr__


def _submodule(name: str, **members: Any) -> ModuleType:
    module = ModuleType(f"torch.{gpus.DEVICE_TYPE}.{name}", f"Like ``torch.cuda.{name}``.")
    vars(module).update(members, __all__=sorted(members), __getattr__=_missing_in(name))
    return module


def _names_of_ours(theirs: Any) -> dict[str, Any]:
    """Return the members of one of torch.cuda's modules that this module has, too."""
    return {name: globals()[name] for name in theirs.__all__ if name in globals()}


amp = _submodule(
    "amp",
    autocast=_Autocast,
    GradScaler=_GradScaler,
    custom_fwd=functools.partial(torch.amp.custom_fwd, device_type=gpus.DEVICE_TYPE),
    custom_bwd=functools.partial(torch.amp.custom_bwd, device_type=gpus.DEVICE_TYPE),
)
memory = _submodule("memory", **_names_of_ours(torch.cuda.memory))
# These names, with their underscores, are documented on PyTorch's page about CUDA memory.
vars(memory).update(
    _record_memory_history=snapshot.record_history,
    _snapshot=snapshot.snapshot,
    _dump_snapshot=snapshot.dump,
)
_MARKERS = ("mark", "range_end", "range_pop", "range_push", "range_start")
nvtx = _submodule("nvtx", range=_range, **dict.fromkeys(_MARKERS, _marker))
random = _submodule("random", **_names_of_ours(torch.cuda.random))
__getattr__ = _missing_in("")
