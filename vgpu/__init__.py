"""Virtual GPUs: as many accelerators of device type ``vgpu`` as you like, in pure Python."""

from vgpu import torch_releases  # noqa: F401  first: it rejects a torch that is too old
from vgpu.backend import disable, enable, is_enabled
from vgpu.collectives.cluster import Cluster, cluster, data_parallel_iteration, ddp_iteration
from vgpu.hardware import LINKS, NETWORKS, PRESETS, GPUSpec, Link, Network, get_spec
from vgpu.memory.blocks import record_memory
from vgpu.run_program import load_ipython_extension, unload_ipython_extension  # noqa: F401
from vgpu.tensor.methods import NoValueError
from vgpu.tensor.shapes import shapes_only
from vgpu.tensor.tensor import is_shape
from vgpu.time.costs import CostModel, fit_share
from vgpu.time.recording import record, spend
from vgpu.time.simulate import Deadlock, joined, replay
from vgpu.time.timeline import FreedInUse, Race, Timeline, TraceEvent, covered_s

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
