"""The virtual GPUs of this process, and the current device and streams of each thread."""

import threading
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
# can only return a type, for which C++ assumes index 0. A type that no tensor has distinguishes
# "the current device" from vgpu:0.
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
        self.generator: torch.Generator | None = None  # tensor/compute.py creates it

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
    """A thread's current device, and its current stream on each device (time/streams.py)."""

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

    Afterwards, the previous GPUs are restored, including their bytes, peaks, generators and each
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

    The engine makes a node's stream current; a hook can then set another one.
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

    In a backward pass, it's the node's stream (only known in a recording), unless a hook set
    another.
    """
    number = set_stream_number(index)
    if number is None:
        number = stream_number_of_node(index) if in_backward() else 0
    return number


def stream_number_of_node(index: int) -> int:
    """Return the number of the stream that the engine makes current on a GPU for the running node.

    That's the stream of the node's forward operation, or on other GPUs, the default stream. After
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
