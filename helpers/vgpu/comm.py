"""Scatter, gather and broadcast between virtual GPUs: what CUDA does in C++ for DataParallel.

Each stands in for the function of the same name in ``torch.nn.parallel.comm``, under autograd's
own ``Scatter``, ``Gather`` and ``Broadcast``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _get_device_index

from helpers.vgpu import gpus


def scatter(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Chunks of ``tensor`` along ``dim``, one per device; fewer where the size does not suffice."""
    if out is not None:
        sizes = [part.size(dim) for part in out]
        for part, chunk in zip(out, tensor.split(sizes, dim), strict=True):
            part.copy_(chunk)
        return tuple(out)
    targets = [_device(d) for d in devices]
    if chunk_sizes is None:
        chunks = tensor.chunk(len(targets), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    return tuple(chunk.to(target) for chunk, target in zip(chunks, targets, strict=False))


def gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> torch.Tensor:
    """The tensors side by side along ``dim`` on ``destination`` or in ``out``; -1 is the CPU.

    Each tensor is copied straight into its place, so no second copy takes memory there.
    """
    sizes = [tensor.size(dim) for tensor in tensors]
    shape = list(tensors[0].shape)
    for index, tensor in enumerate(tensors):
        shape[dim] = sizes[index]
        if list(tensor.shape) != shape:
            raise RuntimeError(
                f"Input tensor at index {index} has invalid shape {list(tensor.shape)}, "
                f"but expected {shape}"
            )
    shape[dim] = sum(sizes)
    if out is None:
        index = _get_device_index(destination, allow_cpu=True, optional=True)
        target = torch.device("cpu") if index == -1 else _device(index)
        out = torch.empty(shape, dtype=tensors[0].dtype, device=target)
    for part, tensor in zip(out.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor)
    return out


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Any, buffer_size: int = 10485760
) -> list[list[torch.Tensor]]:
    """The tensors on every device: on their own device themselves, copies elsewhere."""
    return [[tensor.to(_device(device)) for tensor in tensors] for device in devices]


def _device(index_or_device: Any) -> torch.device:
    return gpus.by_index(_get_device_index(index_or_device)).device
