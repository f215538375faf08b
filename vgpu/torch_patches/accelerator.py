"""``torch.accelerator`` and whoever asks torch which device type there is."""

import sys

import torch

from vgpu.changes import Changes
from vgpu.memory import gpus
from vgpu.torch_patches import device_module

# Functions behind torch.accelerator; its C++ half knows one device, and no streams.
_ACCELERATOR = {
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


def install(changes: Changes) -> None:
    for name, function in _ACCELERATOR.items():
        changes.set(torch._C, name, function)
    # torch asks for CUDA and MPS first; whoever enables virtual GPUs means those.
    for module in (torch._utils, sys.modules["torch.nn.parallel.data_parallel"]):
        changes.set(module, "_get_available_device_type", lambda: gpus.DEVICE_TYPE)
    for name in ("amp", "memory", "nvtx", "random"):  # for "from torch.vgpu.amp import ..."
        module = getattr(device_module, name)
        changes.item(sys.modules, f"torch.{gpus.DEVICE_TYPE}.{name}", module)
