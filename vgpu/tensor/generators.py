"""Random number generators: each virtual GPU has one, based on a CPU generator.

``torch.manual_seed`` seeds them all with the same seed, so a virtual GPU draws the same numbers as
the CPU, regardless of other devices and of the order in which threads run.
"""

import weakref
from typing import Any

import torch

from vgpu.memory import gpus

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
    """Return the offset in a generator's state, as an int64 tensor that shares the state's memory."""
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
