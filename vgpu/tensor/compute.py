"""CPU computation on the values inside virtual tensors, and random number generators."""

import math
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operators import Args, Kwargs, Operator, OperatorInfo

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

    _gpu: gpus.VirtualGPU
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
    gpu = None if device is None else gpus.resolve(torch.device(device))
    if gpu is None:
        return _PlainGenerator() if device is None else _PlainGenerator(device)
    return _generator_of(gpu)


def _generator_of(gpu: gpus.VirtualGPU) -> DeviceGenerator:
    generator = DeviceGenerator()
    generator._gpu = gpu
    _owners[generator._cdata] = generator
    return generator


def _generator_in(gpu: gpus.VirtualGPU, state: torch.Tensor) -> DeviceGenerator:
    return _generator_of(gpu).set_state(state)


def _restored(device: torch.device, state: torch.Tensor) -> DeviceGenerator:
    """Return a new generator with the same state, for pickle and deepcopy."""
    gpu = gpus.resolve(device)
    assert gpu is not None
    return _generator_in(gpu, state)


def generator_for(gpu: gpus.VirtualGPU, given: torch.Generator | None) -> torch.Generator:
    """Return the generator for an operation on ``gpu``: ``given``, or the device's default."""
    if given is None:
        return default_generator(gpu)
    if given._cdata not in _owners:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"Expected a '{gpus.DEVICE_TYPE}' device type for generator "
            f"but found '{given.device.type}'"
        )
    return given


def default_generator(gpu: gpus.VirtualGPU) -> torch.Generator:
    if gpu.generator is None:
        gpu.generator = _generator_of(gpu)
    return gpu.generator


# Computing


# C++ resolves lazy conjugation and negation before it calls Python. Kernels that consist of
# multiple operators rely on that for their parts, too, so it's turned back on for CPU kernels.
_resolving = torch._C._SetExcludeDispatchKeyGuard
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def compute(
    info: OperatorInfo,
    args: Args,
    inner_args: list[Any],
    inner_kwargs: Kwargs,
    gpu: VirtualGPU | None,
) -> Any:
    """Return the operator's results, computed on the CPU.

    ``inner_args`` and ``inner_kwargs`` have CPU tensors in place of virtual ones.
    """
    func = info.func
    if info.unchanged:
        return func(*inner_args, **inner_kwargs)
    if info.draws and gpu is not None:
        return _draw(info, inner_args, inner_kwargs, gpu)
    if info.writes_lists:
        return counting_versions(func, args, inner_args, inner_kwargs, info.writes_lists)
    if info.convolves and inner_args[0].dtype is torch.float16:
        return _in_float32(func, inner_args)
    if any(_is_complex(value) for value in inner_args):
        with _resolving(_CONJUGATE, False), _resolving(_NEGATIVE, False):
            return func(*inner_args, **inner_kwargs)
    return func(*inner_args, **inner_kwargs)


def _draw(
    info: OperatorInfo, inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU
) -> Any:
    """Run an operator that draws random numbers, with the call's generator or the GPU's default."""
    if info.with_generator is None:  # operators that draw without one have handlers
        return info.func(*inner_args, **inner_kwargs)
    generator = generator_for(gpu, inner_kwargs.get("generator"))
    return info.with_generator(*inner_args, **{**inner_kwargs, "generator": generator})


def counting_versions(
    func: Operator,
    args: Args,
    inner_args: list[Any],
    inner_kwargs: Kwargs,
    positions: Iterable[int],
) -> Any:
    """Run an operator that modifies the lists of tensors at ``positions`` in place.

    C++ increments the version of a single tensor that is modified in place, but not the versions of
    tensors in a list. Here, each tensor in a list gets as many increments as an alias of its
    values.
    """
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in positions:
        inner_args[position] = [
            values if values.is_inference() else values.data for values in inner_args[position]
        ]
        changed += zip(args[position], inner_args[position], strict=True)
    try:
        with _resolving(_IN_PLACE_OR_VIEW, False):
            return func(*inner_args, **inner_kwargs)
    finally:
        for one, alias in changed:
            if not alias.is_inference():
                torch._C._increment_version([one] * alias._version)


def _in_float32(func: Operator, inner_args: Sequence[Any]) -> Any:
    """Run a float16 convolution in float32, the dtype in which GPUs accumulate.

    The CPU's float16 kernel is 50 times slower.
    """

    def cast(values: Iterable[Any], dtype: torch.dtype, wider: torch.dtype) -> list[Any]:
        return [
            value.to(wider) if isinstance(value, torch.Tensor) and value.dtype is dtype else value
            for value in values
        ]

    result = func(*cast(inner_args, torch.float16, torch.float32))
    if isinstance(result, torch.Tensor):
        return result.to(torch.float16)
    return tuple(cast(result, torch.float32, torch.float16))


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def set_inner_device(inner_kwargs: Kwargs, gpu: VirtualGPU | None) -> VirtualGPU | None:
    """Replace ``device=`` with the CPU; return the result's GPU, or None for a real device."""
    device = inner_kwargs.get("device")
    if device is None:
        return gpu
    target = gpus.resolve(device)
    if target is not None:
        inner_kwargs["device"] = "cpu"
        inner_kwargs.pop("pin_memory", None)
    return target


# The host's memory, which may be smaller than the GPU's


def require_room(inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU) -> None:
    """Raise torch.OutOfMemoryError before the CPU allocates more memory than the GPU has left."""
    # A factory's first argument is the size, or a tensor (``*_like``), perhaps followed by the
    # size.
    first = size = inner_args[0] if inner_args else None
    if isinstance(first, torch.Tensor) and len(inner_args) > 1:
        size = inner_args[1]
    if not isinstance(size, list) or not all(isinstance(number, int) for number in size):
        return
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.get_default_dtype()
    dtype = inner_kwargs.get("dtype") or dtype
    gpu.memory.require(math.prod(size) * dtype.itemsize)


def refuse_host_memory(error: RuntimeError, gpu: VirtualGPU) -> None:
    """Raise the GPU's torch.OutOfMemoryError if the CPU's allocator failed to allocate a result."""
    found = _HOST_REFUSAL.search(str(error))
    if found is not None:
        size_bytes = int(found[1])
        gpu.memory.require(size_bytes)
        raise torch.OutOfMemoryError(gpu.memory.out_of_host_memory(size_bytes)) from None


_HOST_REFUSAL = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")
