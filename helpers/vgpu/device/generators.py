"""Random numbers: one generator per virtual GPU, each a CPU generator inside.

``torch.manual_seed`` seeds them all alike, so a virtual GPU draws what the CPU would draw, and what
one device draws does not depend on the others or on the order in which threads run.
"""

import weakref
from typing import Any

import torch

from helpers.vgpu.device import gpus

_PlainGenerator = torch.Generator

# C++ hands a generator back as a new Python object; its address tells which one it is.
_owners: weakref.WeakValueDictionary[int, "DeviceGenerator"] = weakref.WeakValueDictionary()


class DeviceGenerator(_PlainGenerator):
    """A generator of a virtual GPU."""

    _gpu: Any
    _cdata: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._gpu.device


def make_generator(device: Any = None) -> torch.Generator:
    """What ``torch.Generator(device)`` makes while virtual GPUs are enabled."""
    gpu = None if device is None else gpus.resolve(torch.device(device))
    if gpu is None:
        return _PlainGenerator() if device is None else _PlainGenerator(device)
    generator = DeviceGenerator()
    generator._gpu = gpu
    _owners[generator._cdata] = generator
    return generator


def generator_for(gpu: Any, given: Any) -> torch.Generator:
    """The generator for an operation on ``gpu``: the given one, or the device's own."""
    if given is None:
        return default_generator(gpu)
    if given._cdata not in _owners:
        raise RuntimeError(
            f"Expected a '{gpus.DEVICE_TYPE}' device type for generator "
            f"but found '{given.device.type}'"
        )
    return given


def default_generator(gpu: gpus.VirtualGPU) -> torch.Generator:
    if gpu.generator is None:
        gpu.generator = _PlainGenerator()
    return gpu.generator


def draw(rule: Any, func: Any, args: list, kwargs: dict, gpu: gpus.VirtualGPU) -> Any:
    """Run an operation that draws random numbers, from the generator of ``gpu``."""
    if rule.with_generator is None:  # what draws in fact has a handler of its own
        return func(*args, **kwargs)
    given = kwargs.get("generator")
    return rule.with_generator(*args, **{**kwargs, "generator": generator_for(gpu, given)})
