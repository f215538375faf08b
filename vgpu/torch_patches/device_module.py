"""``torch.vgpu``, the counterpart of ``torch.cuda``. This module itself is registered with torch.

A ``device`` of None means the current device, as in ``torch.cuda``. Some names are imported from
the files that implement them. The modules ``torch.vgpu.amp``, ``memory``, ``nvtx`` and ``random``
are created at the end of this file.
"""

import contextlib
import functools
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from vgpu.hardware import GPUSpec
from vgpu.memory import blocks, gpus, snapshot
from vgpu.memory.blocks import DeviceMemory
from vgpu.memory.gpus import current_index as current_device  # noqa: F401
from vgpu.memory.gpus import (
    current_stream_number,
    device_count,  # noqa: F401
    meant_by,
    set_streams,
)
from vgpu.time import recording
from vgpu.time.program import GrowingProgram, RecordedEvent, RecordedStream

# Devices

# torch.utils.checkpoint saves the generators' states if this is set.
_initialized = True

OutOfMemoryError = torch.OutOfMemoryError


def is_available() -> bool:
    return gpus.device_count() > 0


def is_initialized() -> bool:
    """Return False until a device is chosen or used.

    While it's False, DeviceMesh makes LOCAL_RANK's device current.
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


# Streams and events
#
# An operation has finished when its call returns, so waiting takes no real time. These classes only
# track each thread's current streams, and when an event was recorded: by the host's clock or, in a
# recording, in virtual time.

_stream_ids = itertools.count(1)
_HIGHEST_PRIORITY = -3  # c10/cuda/CUDAStream.h: max_compile_time_stream_priorities


class Stream(torch.Stream):
    """A queue of work on one virtual GPU; ``with stream:`` makes it and its device current."""

    _entered: list[tuple["Stream | None", int]]

    def __new__(
        cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> "Stream":
        index = _index(device)
        stream = super().__new__(
            cls,
            stream_id=next(_stream_ids) if stream_id is None else stream_id,
            device_index=index,
            device_type=torch._C._autograd.DeviceType.PrivateUse1.value,
        )
        stream._entered = []
        if stream_id is None and priority < 0:
            gpus.stream_priorities[stream.stream_id] = max(priority, _HIGHEST_PRIORITY)
        return stream

    @property
    def priority(self) -> int:
        """0, or negative if the stream's kernels overtake other streams' kernels, as in CUDA."""
        return gpus.stream_priorities.get(self.stream_id, 0)

    def query(self) -> bool:
        """Whether all work submitted to this stream has finished."""
        program = _program()
        return program is None or program.query_stream(_recorded(self, program))

    def synchronize(self) -> None:
        """Wait until all work submitted to this stream has finished."""
        program = _program()
        if program is not None:
            program.synchronize([_recorded(self, program)])

    def wait_event(self, event: torch.Event) -> None:
        """Make future work submitted to this stream wait for ``event``."""
        program = _program()
        if program is not None:
            program.wait_event(_recorded(self, program), getattr(event, "_recorded", None))

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make future work submitted to this stream wait for all current work of ``stream``."""
        program = _program()
        if program is not None:
            program.wait_stream(_recorded(self, program), _recorded(stream, program))

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        self._entered.append((set_streams().get(self.device_index), gpus.current_index()))
        set_stream(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        stream, index = self._entered.pop()
        if stream is None:
            set_streams().pop(self.device_index, None)
        else:
            set_stream(stream)
        gpus.exchange_index(index)

    def __repr__(self) -> str:
        return f"<torch.vgpu.Stream device={self.device} stream_id={self.stream_id}>"


class Event(torch.Event):
    """An event of a stream; with ``enable_timing``, its time can be queried."""

    _enable_timing: bool
    _host_time_s: float | None  # if it was recorded outside a recording
    _recorded: RecordedEvent | None  # if it was recorded in one

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> "Event":
        event = super().__new__(cls, gpus.DEVICE_TYPE, enable_timing=enable_timing)
        event._enable_timing = enable_timing
        event._host_time_s = event._recorded = None
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record the event on ``stream``, or on the current stream."""
        program = _program()
        self._host_time_s = self._recorded = None
        if program is None:
            self._host_time_s = time.perf_counter()
        else:
            of = _recorded(current_stream() if stream is None else stream, program)
            self._recorded = program.record_event(of, self._enable_timing)

    def query(self) -> bool:
        """Whether the event has happened; True if it was never recorded."""
        program = _program()
        return program is None or program.query_event(self._recorded)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make future work on ``stream``, by default the current one, wait for the event."""
        program = _program()
        if program is not None:
            waiting = _recorded(current_stream() if stream is None else stream, program)
            program.wait_event(waiting, self._recorded)

    def synchronize(self) -> None:
        """Wait until the event has happened."""
        program = _program()
        if program is not None:
            program.host_waits_for_event(self._recorded)

    def elapsed_time(self, end_event: "Event") -> float:  # type: ignore[override]
        """Return the milliseconds between two events: virtual time if they're from a recording."""
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._is_recorded and end_event._is_recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self._recording is not end_event._recording:
            raise RuntimeError(
                "one event was recorded in virtual time and the other by the host's clock, or in "
                "another recording: record both in one vgpu.record() block, or both outside of one"
            )
        return (end_event._time_s() - self._time_s()) * 1000

    @property
    def _is_recorded(self) -> bool:
        return self._host_time_s is not None or self._recorded is not None

    @property
    def _recording(self) -> object:
        """The recording in whose virtual time the event was recorded; None for the host's clock."""
        return None if self._recorded is None else self._recorded.recording

    def _time_s(self) -> float:
        if self._recorded is None:
            assert self._host_time_s is not None
            return self._host_time_s
        if self._recorded.time_s is None:  # the recording is still active
            program = _program()
            assert program is not None
            return program.time_s(self._recorded.operation.event)
        return self._recorded.time_s

    def __repr__(self) -> str:
        return f"<torch.vgpu.Event recorded={self._is_recorded}>"


def _index(device: Any) -> int:
    return gpus.current_index() if device is None else gpus.meant_by(device).index


def default_stream(device: Any = None) -> Stream:
    """Return the default stream of a device."""
    return Stream(_index(device), stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device in this thread."""
    index = _index(device)
    return set_streams().get(index) or Stream(index, stream_id=current_stream_number(index))


def set_stream(stream: Stream) -> None:
    """Make a stream and its device current in this thread."""
    if stream.stream_id:
        blocks.several_streams = True
    gpus.exchange_index(stream.device_index)
    set_streams()[stream.device_index] = stream


def stream(stream: Stream | None) -> Any:
    """Return a context manager that makes a stream and its device current; None changes nothing."""
    return device(None) if stream is None else stream


def synchronize(device: Any = None) -> None:
    """Wait for all work on a device; in a recording, the host waits in virtual time."""
    gpu, now = meant_by(device), recording.under_way
    if now is not None:
        now.program.synchronize(now.program.streams_of(gpu))


def _program() -> GrowingProgram | None:
    """Return the program of the active recording, if any."""
    return None if recording.under_way is None else recording.under_way.program


def _recorded(stream: torch.Stream, program: GrowingProgram) -> RecordedStream:
    return program.stream(gpus.by_index(stream.device_index), stream.stream_id)


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
            f"module '{ours}' has no attribute '{name}': {theirs} has it, but virtual GPUs "
            f"don't support it; {advice}"
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
