"""Replacements that ``nn.DataParallel`` needs: copies between GPUs, streams and threads.

``scatter``, ``gather``, ``broadcast_coalesced`` and ``reduce_add`` replace the functions of the
same name in ``torch.nn.parallel.comm``, whose C++ code supports only CUDA; autograd's ``Scatter``,
``Gather`` and ``Broadcast`` call them. In a recording of virtual time, a broadcast or reduce costs
the same as NCCL's, which torch uses on CUDA.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch._utils import _get_device_index, _handle_complex
from torch.nn.parallel import comm

from vgpu.memory import gpus
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time import recording
from vgpu.torch_patches import device_module
from vgpu.torch_patches.undo import Changes

_plain_reduce_add = comm.reduce_add


def install(changes: Changes) -> None:
    for function in (scatter, gather, broadcast_coalesced, reduce_add):
        changes.set(comm, function.__name__, function)
    changes.wrap(torch.cuda.nccl, "is_available", nccl_is_available)
    changes.set(torch.nn.parallel._functions, "_get_stream", copy_stream)
    parallel_apply = recording.sharing_the_interpreter(torch.nn.parallel.parallel_apply)
    changes.set(torch.nn.parallel, "parallel_apply", parallel_apply)
    # Unlike the rest of torch.nn.parallel, this module uses torch.cuda's function, which accepts no
    # other devices.
    module = sys.modules["torch.nn.parallel.parallel_apply"]
    changes.set(module, "_get_device_index", torch._utils._get_device_index)
    for name in ("data_parallel", "parallel_apply"):
        module = sys.modules[f"torch.nn.parallel.{name}"]
        changes.set(module, "parallel_apply", parallel_apply)


def nccl_is_available(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``torch.cuda.nccl.is_available`` so that it returns False for virtual tensors.

    torch's own function warns if torch was built without NCCL.
    """

    def is_available(tensors: Iterable[object]) -> bool:
        virtual = any(isinstance(tensor, VirtualTensor) for tensor in tensors)
        return not virtual and plain(tensors)

    return is_available


@functools.cache
def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return a device's background stream for CPU copies (``torch.nn.parallel._functions``)."""
    return None if device.type == "cpu" else device_module.Stream(device)


def scatter(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Split ``tensor`` along ``dim`` into a chunk per device; fewer if the dimension is too small.

    ``streams`` has the stream for each device's copy, or None for the current one. The host doesn't
    wait.
    """
    tensor = _handle_complex(tensor)
    targets = [_device(d) for d in devices]
    if chunk_sizes is None:
        chunks = tensor.chunk(len(targets), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    moved = []
    for chunk, target, stream in zip(chunks, targets, streams or repeat(None), strict=False):
        with nullcontext() if stream is None else stream:
            moved.append(chunk.to(target, non_blocking=True))
    return tuple(moved)


def gather(tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None) -> torch.Tensor:
    """Concatenate the tensors along ``dim`` on ``destination``; -1 is the CPU.

    Each tensor is copied directly into the result, so there's no second copy on that device.
    """
    tensors = [_handle_complex(tensor) for tensor in tensors]
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
    index = _get_device_index(destination, allow_cpu=True, optional=True)
    target = torch.device("cpu") if index == -1 else _device(index)
    out = torch.empty(shape, dtype=tensors[0].dtype, device=target)
    for part, tensor in zip(out.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor)
    return out


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Any, buffer_size: int = 10485760
) -> list[list[torch.Tensor]]:
    """Return the tensors on every device: copies, except on their own device.

    The copies have no autograd history, like those from C++; autograd's ``Broadcast`` adds it.
    """
    targets = [_device(device) for device in devices]
    tensors = [_handle_complex(tensor) for tensor in tensors]
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    with _as_collective("broadcast", size_bytes, targets, buffer_size):
        return [
            [t if t.device == target else t.to(target).detach() for t in tensors]
            for target in targets
        ]


def reduce_add(inputs: Sequence[torch.Tensor], destination: Any = None) -> torch.Tensor:
    """Sum the inputs on one device with torch's own function, recorded as a single reduce."""
    devices = [tensor.device for tensor in inputs]
    first = inputs[0]
    parts = (first,) if first.layout is torch.strided else (first._indices(), first._values())
    size_bytes = sum(part.nbytes for part in parts)
    with _as_collective("reduce", size_bytes, devices, size_bytes):
        total: torch.Tensor = _plain_reduce_add(inputs, destination)
    return total


def _device(index_or_device: Any) -> torch.device:
    return gpus.by_index(_get_device_index(index_or_device)).device


@contextmanager
def _as_collective(
    name: str, size_bytes: int, devices: Sequence[torch.device], buffer_bytes: int
) -> Iterator[None]:
    """In a recording, record the copies in the block as one NCCL collective per buffer.

    ``size_bytes`` is per GPU.
    """
    now = recording.under_way
    if now is None or len(devices) < 2 or size_bytes == 0:
        yield
        return
    with recording.paused():
        yield
    taking_part = [gpus.by_index(device.index) for device in devices]
    for begin_bytes in range(0, size_bytes, buffer_bytes):
        now.local_collective(name, min(size_bytes - begin_bytes, buffer_bytes), taking_part)
