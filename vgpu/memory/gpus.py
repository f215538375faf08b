"""The virtual GPUs of this process, each thread's current device and streams, and generators."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vgpu.hardware import GPUSpec
from vgpu.memory import blocks as memory
from vgpu.memory.blocks import DeviceMemory

DEVICE_TYPE = "vgpu"
# The device type that C++ sees. It must be a type whose index autograd preserves and for which
# torch ships no kernels; Lazy is the only one (tensor/tensor.py).
CPP_DEVICE_TYPE = "lazy"
# For "vgpu" without an index, C++ asks the device guard for the current device. A guard in Python
# can only return a type, for which C++ assumes index 0. It returns a type that no tensor has, so
# that "the current device" can be told from vgpu:0.
CURRENT_DEVICE_TYPE = "ve"
_OUR_TYPES = (DEVICE_TYPE, CPP_DEVICE_TYPE, CURRENT_DEVICE_TYPE)


class DeviceGuard(torch._C._acc.DeviceGuard):
    """The device guard that C++ asks for the current device."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.VE  # type: ignore[attr-defined]


class VirtualGPU:
    """One GPU: its names in Python and in C++, its memory, and its random number generator."""

    def __init__(self, index: int, spec: GPUSpec, capacity_bytes: int) -> None:
        self.index = index
        self.device = torch.device(DEVICE_TYPE, index)
        self.cpp_device = torch.device(CPP_DEVICE_TYPE, index)
        self.spec = spec
        self.memory = DeviceMemory(self.device, capacity_bytes, current_stream_number)
        self.generator: torch.Generator | None = None  # created on first use

    def __repr__(self) -> str:
        return f"VirtualGPU({self.device}, {self.spec.name})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "VirtualGPU":
        # dcp.async_save deep-copies a tensor's attributes; copying a GPU would copy all its blocks.
        return self


# A GPU stays in this list when fewer are enabled later: tensors may still be on it, and their bytes
# must be counted when it's enabled again.
_known: list[VirtualGPU] = []
_by_device: dict[torch.device, VirtualGPU] = {}


class _Choices(threading.local):
    """A thread's current device, and its current stream on each device."""

    def __init__(self) -> None:
        self.index = 0
        self.of_node: tuple[tuple[int, int] | None, int] = None, 0
        self.streams: dict[int, Any] = {}
        # Streams set by hooks, per backward pass: a stack, since backward passes can be nested.
        self.of_backward: list[tuple[int, dict[int, Any]]] = []


class Use:
    """The use of a host's GPUs from when they're enabled until they're disabled.

    Initially, as in a new process, no thread has chosen a device.
    """

    def __init__(self) -> None:
        self.current = _Choices()
        self.has_chosen = False
        self._allocated_before = _allocation_count()

    @property
    def has_begun(self) -> bool:
        """Whether this process has set the current device or allocated something on a GPU."""
        return self.has_chosen or _allocation_count() > self._allocated_before


def _allocation_count() -> int:
    return sum(gpu.memory.allocation_count for gpu in _known)


_count = 0
in_use = Use()


def set_count(count: int, spec: GPUSpec, capacity_bytes: int) -> None:
    """Make exactly the GPUs 0 to ``count - 1`` available; live tensors stay on their GPUs."""
    global in_use
    if _count == 0:
        in_use = Use()
        for gpu in _known:
            gpu.memory.begin_anew()
    for index in range(count):
        if index == len(_known):
            _known.append(VirtualGPU(index, spec, capacity_bytes))
        _known[index].spec = spec
        _known[index].memory.set_capacity(capacity_bytes)
    _name(count)


def _name(count: int) -> None:
    """Map device names to the first ``count`` GPUs."""
    global _count
    _count = count
    _by_device.clear()
    for gpu in _known[:count]:
        _by_device[gpu.device] = gpu
        _by_device[gpu.cpp_device] = gpu


@contextmanager
def of_another_host() -> Iterator[None]:
    """Let the ``with`` block make another host's GPUs available.

    Afterward, the previous GPUs are restored, including their bytes, peaks, generators and each
    thread's current device and streams. Memory that's still allocated on the other host, for
    example by modules in reference cycles, counts only there.
    """
    global _known, in_use
    known, before, count = _known, in_use, _count
    _known = []
    _name(0)
    try:
        with memory.of_another_host():
            yield
    finally:
        _known, in_use = known, before
        _name(count)


def device_count() -> int:
    return _count


def current_index() -> int:
    """Return the calling thread's current device index, or 0 if it's unset or unavailable now.

    In a backward pass, it's the device of the running node, as autograd ensures on CUDA.
    """
    node = _current_node()
    if node is not None:
        set_for, index = in_use.current.of_node
        if set_for == node[0]:
            return index
        if node[1] is not None:
            return node[1]
    index = in_use.current.index
    return index if index < _count else 0


def exchange_index(index: int) -> int:
    """Make ``index`` current and return the previous one; a negative index changes nothing.

    In a backward pass, the device stays current while the node runs.
    """
    before = current_index()
    if index >= 0:
        found = by_index(index).index
        in_use.has_chosen = True
        node = _current_node()
        if node is None:
            in_use.current.index = found
        else:
            in_use.current.of_node = (node[0], found)
    return before


def _current_node() -> tuple[tuple[int, int], int | None] | None:
    """Return a key for the autograd node that runs in this thread, and its GPU's index."""
    task = graph_task()
    node = None if task == -1 else torch._C._current_autograd_node()
    if node is None:
        return None
    devices = [metadata.device for metadata in node._input_metadata]
    own = [device.index for device in devices if device.type == CPP_DEVICE_TYPE]
    return (task, node._sequence_nr()), own[0] if own else None


graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether the caller is running in a backward pass."""
    return graph_task() != -1


stream_priorities: dict[int, int] = {}
"""Nonzero priorities by stream number; kernels on negative-priority streams overtake others."""

# In a recording, the GPU index and stream number of each autograd node that was created on a
# non-default stream, by the node's sequence number.
streams_of_nodes: dict[int, tuple[int, int]] = {}


def set_streams() -> dict[int, Any]:
    """Return the streams set by this thread, or in this backward pass, by GPU index.

    The engine makes a node's stream current; a hook can then set a different one.
    """
    current = in_use.current
    backward = graph_task()
    under_way = current.of_backward
    if backward == -1:
        under_way.clear()
        return current.streams
    while under_way and under_way[-1][0] > backward:  # from a nested pass that has ended
        under_way.pop()
    if not under_way or under_way[-1][0] != backward:
        under_way.append((backward, {}))
    return under_way[-1][1]


def set_stream_number(index: int) -> int | None:
    """Return the number of the stream that this thread has set on a GPU, or None."""
    stream = set_streams().get(index)
    return None if stream is None else stream.stream_id


def current_stream_number(index: int) -> int:
    """Return the number of the current stream of a GPU in this thread; 0 is the default stream.

    In a backward pass, it's the node's stream (only known in a recording), unless a hook set a
    different one.
    """
    number = set_stream_number(index)
    if number is None:
        number = stream_number_of_node(index) if in_backward() else 0
    return number


def stream_number_of_node(index: int) -> int:
    """Return the number of the stream that the engine makes current on a GPU for the running node.

    That's the stream of the node's forward operation or, on other GPUs, the default stream. After
    the last node, in the engine's callbacks, it's the stream of the caller of ``backward()``.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return callers_stream_number(index)
    gpu, number = streams_of_nodes.get(node._sequence_nr(), (index, 0))
    return number if gpu == index else 0


def callers_stream_number(index: int) -> int:
    """Return the number of the stream that was current on a GPU when ``backward()`` was called."""
    stream = in_use.current.streams.get(index)
    return 0 if stream is None else stream.stream_id


def by_index(index: int) -> VirtualGPU:
    """Return the GPU with this index; raise CUDA's error if there is none."""
    if 0 <= index < _count:
        return _known[index]
    raise _no_such_device(index)


def resolve(device: torch.device) -> VirtualGPU | None:
    """Return the GPU for a device, by its name in Python or in C++; None for any other device."""
    gpu = _by_device.get(device)
    if gpu is None and device.type in _OUR_TYPES:
        current = device.index is None or device.type == CURRENT_DEVICE_TYPE
        return by_index(current_index() if current else device.index)
    return gpu


def meant_by(device: Any) -> VirtualGPU:
    """Return the GPU for an int, a string, a torch.device or None (the current one)."""
    if device is None:
        return by_index(current_index())
    if isinstance(device, int):
        return by_index(device)
    gpu = resolve(torch.device(device))
    if gpu is None:
        raise ValueError(f"Expected a {DEVICE_TYPE} device, but got: {device}")
    return gpu


def shown(device: torch.device) -> torch.device:
    """Return a virtual GPU's device as Python names it; return any other device unchanged."""
    if device.type == CPP_DEVICE_TYPE:
        return torch.device(DEVICE_TYPE, device.index)
    return device


def _no_such_device(index: int) -> Exception:
    if _count == 0:
        return RuntimeError("No VGPU GPUs are available: call vgpu.enable(count) first")
    return torch.AcceleratorError(
        "VGPU error: invalid device ordinal\n"
        "GPU device may be out of range, do you have enough GPUs?\n"
        f"(vgpu:{index} was requested; {_count} virtual GPUs are enabled)"
    )


# Random number generators: each virtual GPU has one, based on a CPU generator
#
# ``torch.manual_seed`` seeds them all with the same seed, so a virtual GPU draws the same numbers
# as the CPU, regardless of other devices and of the order in which threads run.


_PlainGenerator = torch.Generator

# C++ wraps a generator in a new Python object each time, so its C++ address identifies it.
_owners: weakref.WeakValueDictionary[int, "DeviceGenerator"] = weakref.WeakValueDictionary()


# A state consists of the CPU generator's state and three int64 values: the seed, an offset, and the
# offset for which the CPU state is valid. CUDA's generator has only a seed and an offset, 8 bytes
# each.
PHILOX_BYTES = 16
_TAIL_BYTES = 24


class DeviceGenerator(_PlainGenerator):
    """A generator of a virtual GPU.

    DTensor sets a different offset for each shard and expects the random numbers to be a function
    of seed and offset. A CPU generator has no offset, so setting one reseeds it with a hash of
    both.
    """

    _gpu: VirtualGPU
    _cdata: int
    _offset = 0
    _seed: int | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._gpu.device

    def initial_seed(self) -> int:
        return super().initial_seed() if self._seed is None else self._seed

    def manual_seed(self, seed: int) -> "DeviceGenerator":
        super().manual_seed(seed)
        self._seed, self._offset = None, 0
        return self

    def seed(self) -> int:
        self._seed, self._offset = None, 0
        return super().seed()

    def get_state(self) -> torch.Tensor:
        """Return a CPU byte tensor from which a generator can continue in any process."""
        # The device is explicit because the default device may be a GPU.
        tail = torch.tensor(
            [_signed(self.initial_seed()), self._offset, self._offset], device="cpu"
        )
        return torch.cat([super().get_state(), tail.view(torch.uint8)])

    def set_state(self, state: torch.Tensor) -> "DeviceGenerator":
        seed, offset, holds_for = state[-_TAIL_BYTES:].view(torch.int64).tolist()
        if offset == holds_for:
            super().set_state(state[:-_TAIL_BYTES].clone())
        else:
            super().manual_seed(_mixed(seed, offset))
        self._seed, self._offset = seed % 2**64, offset
        return self

    def clone_state(self) -> "DeviceGenerator":
        return _generator_in(self._gpu, self.get_state())

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.device, self.get_state())


def offset_in(state: torch.Tensor) -> torch.Tensor:
    """Return the offset in a generator's state, an int64 tensor that shares the state's memory."""
    return state[-16:-8].view(torch.int64)


def set_offset_in(state: torch.Tensor, offset: int) -> None:
    """Change the offset in a generator's state."""
    state[-16:] = torch.tensor([offset, -1], device="cpu").view(torch.uint8)


def _mixed(seed: int, offset: int) -> int:
    """Hash seed and offset with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (seed + (offset + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def _signed(number: int) -> int:
    """Return a 64-bit number as a signed int64."""
    return (number + 2**63) % 2**64 - 2**63


def make_generator(device: torch.device | str | int | None = None) -> torch.Generator:
    """Replacement for ``torch.Generator`` while virtual GPUs are enabled."""
    gpu = None if device is None else resolve(torch.device(device))
    if gpu is None:
        return _PlainGenerator() if device is None else _PlainGenerator(device)
    return _generator_of(gpu)


def _generator_of(gpu: VirtualGPU) -> DeviceGenerator:
    generator = DeviceGenerator()
    generator._gpu = gpu
    _owners[generator._cdata] = generator
    return generator


def _generator_in(gpu: VirtualGPU, state: torch.Tensor) -> DeviceGenerator:
    return _generator_of(gpu).set_state(state)


def _restored(device: torch.device, state: torch.Tensor) -> DeviceGenerator:
    """Return a new generator with the same state, for pickle and deepcopy."""
    gpu = resolve(device)
    assert gpu is not None
    return _generator_in(gpu, state)


def generator_for(gpu: VirtualGPU, given: torch.Generator | None) -> torch.Generator:
    """Return the generator for an operation on ``gpu``: ``given``, or the device's default."""
    if given is None:
        return default_generator(gpu)
    if given._cdata not in _owners:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"Expected a '{DEVICE_TYPE}' device type for generator but found '{given.device.type}'"
        )
    return given


def default_generator(gpu: VirtualGPU) -> torch.Generator:
    if gpu.generator is None:
        gpu.generator = _generator_of(gpu)
    return gpu.generator
