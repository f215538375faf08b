"""Virtual GPUs: as many accelerators of device type ``vgpu`` as you like, in pure Python."""

from helpers.vgpu.backend import disable, enable, is_enabled
from helpers.vgpu.memory import record_memory
from helpers.vgpu.specs import PRESETS, GPUSpec

__all__ = ["PRESETS", "GPUSpec", "disable", "enable", "is_enabled", "record_memory"]
