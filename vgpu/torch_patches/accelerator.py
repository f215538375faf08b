"""``torch.accelerator``, and the classes Generator, Stream and Event of any device."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.tensor import generators
from vgpu.time import streams
from vgpu.torch_patches import device_module
from vgpu.torch_patches.undo import Changes

# Functions behind torch.accelerator; its C++ half knows one device, and no streams.
_FUNCTIONS = {
    "_accelerator_getDeviceIndex": gpus.current_index,
    "_accelerator_setDeviceIndex": gpus.exchange_index,
    "_accelerator_exchangeDevice": gpus.exchange_index,
    "_accelerator_maybeExchangeDevice": gpus.exchange_index,
    "_accelerator_getStream": device_module.current_stream,
    "_accelerator_setStream": device_module.set_stream,
    "_accelerator_synchronizeDevice": device_module.synchronize,
    "_accelerator_getMemoryInfo": device_module.mem_get_info,
    "_accelerator_emptyCache": device_module.empty_cache,
    "_accelerator_isAllocatorInitialized": device_module.is_available,
    "_accelerator_getDeviceStats": device_module.memory_stats,
    "_accelerator_resetPeakStats": device_module.reset_peak_memory_stats,
}
# Classes of which C++ could not make an object for a virtual GPU.
_CLASSES: dict[str, Callable[..., Any]] = {
    "Generator": generators.make_generator,
    "Stream": streams.make_stream,
    "Event": streams.make_event,
}


def install(changes: Changes) -> None:
    for name, function in _FUNCTIONS.items():
        changes.set(torch._C, name, function)
    for name, make in _CLASSES.items():
        changes.wrap(torch, name, functools.partial(stand_in_for, make=make))
    # torch asks for CUDA and MPS first; whoever enables virtual GPUs means those.
    for module in (torch._utils, sys.modules["torch.nn.parallel.data_parallel"]):
        changes.set(module, "_get_available_device_type", lambda: gpus.DEVICE_TYPE)
    for name in ("amp", "memory", "nvtx", "random"):  # for "from torch.vgpu.amp import ..."
        module = getattr(device_module, name)
        changes.item(sys.modules, f"torch.{gpus.DEVICE_TYPE}.{name}", module)


def stand_in_for(torch_class: Any, make: Callable[..., Any]) -> Any:
    """A class to put in the place of one of torch's.

    Calling it calls ``make``; ``isinstance`` and ``issubclass`` ask torch's class; classes that a
    user derives from it are made as usual.
    """

    class Meta(type(torch_class)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is stand_in:
                return make(*args, **kwargs)
            return super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            if cls is stand_in:
                return isinstance(instance, torch_class)
            return type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, other: type) -> bool:
            if cls is stand_in:
                return issubclass(other, torch_class)
            return type.__subclasscheck__(cls, other)

    # Where pickle finds it, not where torch's class is from.
    stand_in = Meta(torch_class.__name__, (torch_class,), {"__module__": "torch"})
    return stand_in
