"""What ``nn.DataParallel`` calls for GPUs: its copies (comm.py), its streams and its threads."""

import functools
import sys
from collections.abc import Callable, Iterable

import torch
from torch.nn.parallel import comm as torch_comm

from vgpu.changes import Changes
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time import record
from vgpu.torch_patches import comm, device_module


def install(changes: Changes) -> None:
    for name in ("scatter", "gather", "broadcast_coalesced", "reduce_add"):
        changes.set(torch_comm, name, getattr(comm, name))
    changes.wrap(torch.cuda.nccl, "is_available", nccl_is_available)
    changes.set(torch.nn.parallel._functions, "_get_stream", copy_stream)
    parallel_apply = record.sharing_the_interpreter(torch.nn.parallel.parallel_apply)
    changes.set(torch.nn.parallel, "parallel_apply", parallel_apply)
    # Alone of torch.nn.parallel it asks torch.cuda for an index, which takes no other devices.
    module = sys.modules["torch.nn.parallel.parallel_apply"]
    changes.set(module, "_get_device_index", torch._utils._get_device_index)
    for name in ("data_parallel", "parallel_apply"):
        module = sys.modules[f"torch.nn.parallel.{name}"]
        changes.set(module, "parallel_apply", parallel_apply)


def nccl_is_available(plain: Callable[..., bool]) -> Callable[..., bool]:
    """``torch.cuda.nccl.is_available``: never for virtual tensors.

    torch's own warns where it was built without NCCL.
    """

    def is_available(tensors: Iterable[object]) -> bool:
        virtual = any(isinstance(tensor, VirtualTensor) for tensor in tensors)
        return not virtual and plain(tensors)

    return is_available


@functools.cache
def copy_stream(device: torch.device) -> torch.Stream | None:
    """A device's background stream for copies from the CPU, in ``torch.nn.parallel._functions``."""
    return None if device.type == "cpu" else device_module.Stream(device)
