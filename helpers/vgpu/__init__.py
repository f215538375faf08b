"""Virtual GPUs: as many accelerators of device type ``vgpu`` as you like, in pure Python."""

from helpers.vgpu import torch_releases  # noqa: F401  first: it refuses a torch that is too old
from helpers.vgpu.backend import disable, enable, is_enabled
from helpers.vgpu.cluster.layout import Cluster, cluster
from helpers.vgpu.device.links import LINKS, Link
from helpers.vgpu.device.memory import record_memory
from helpers.vgpu.device.networks import NETWORKS, Network
from helpers.vgpu.device.specs import PRESETS, GPUSpec, get_spec
from helpers.vgpu.iterations import data_parallel_iteration, ddp_iteration
from helpers.vgpu.shapes import NoValueError, is_shape, shapes_only
from helpers.vgpu.timing.costs import CostModel, fit_share
from helpers.vgpu.timing.play.joint import Deadlock, joined, replay
from helpers.vgpu.timing.recorder import record, spend
from helpers.vgpu.timing.trace import FreedInUse, Race, Timeline, TraceEvent, covered_s

__all__ = [
    "LINKS",
    "NETWORKS",
    "PRESETS",
    "Cluster",
    "CostModel",
    "Deadlock",
    "FreedInUse",
    "GPUSpec",
    "Link",
    "Network",
    "NoValueError",
    "Race",
    "Timeline",
    "TraceEvent",
    "cluster",
    "covered_s",
    "data_parallel_iteration",
    "ddp_iteration",
    "disable",
    "enable",
    "fit_share",
    "get_spec",
    "is_enabled",
    "is_shape",
    "joined",
    "record",
    "record_memory",
    "replay",
    "shapes_only",
    "spend",
]
