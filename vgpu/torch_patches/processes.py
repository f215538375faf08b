"""Tensors of virtual GPUs on their way to another process, as torch.multiprocessing sends them.

As with CUDA, a tensor arrives on the device that it was sent from, and both processes see the same
memory. The process that receives it must have enabled virtual GPUs; it counts the bytes as its own.
"""

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from vgpu.memory import gpus
from vgpu.tensor.tensor import VirtualTensor, wrap
from vgpu.torch_patches.undo import Changes


def reduce_tensor(tensor: VirtualTensor) -> tuple[Any, ...]:
    """How to send a tensor: a function that makes it there, and its arguments."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd "
            "does not support crossing process boundaries. If you just want to transfer the data, "
            "call detach() on the tensor before serializing (e.g., putting it on the queue)."
        )
    warn_if_has_hooks(tensor)
    place = (tensor._gpu.index, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))
    if tensor.layout is not torch.strided:
        return _receive_copy, (tensor.detach().cpu(), *place)
    values = tensor._inner.resolve_conj().resolve_neg()
    rebuild_storage, args = reductions.reduce_storage(values.untyped_storage())
    geometry = (values.dtype, values.storage_offset(), values.size(), values.stride())
    return _receive, (rebuild_storage, args, geometry, *place)


def _receive(
    rebuild_storage: Callable[..., torch.UntypedStorage],
    args: tuple[Any, ...],
    geometry: tuple[Any, ...],
    index: int,
    *rest: bool,
) -> torch.Tensor:
    dtype, *where = geometry
    gpu = gpus.by_index(index)
    values = torch.empty(0, dtype=dtype, device="cpu").set_(rebuild_storage(*args), *where)
    return _as_sent(wrap(values, gpu, "receive"), *rest)


def _receive_copy(values: torch.Tensor, index: int, *rest: bool) -> torch.Tensor:
    return _as_sent(wrap(values, gpus.by_index(index), "receive"), *rest)


def _as_sent(tensor: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def reduce_storage(storage: torch.UntypedStorage) -> Any:
    """``torch.multiprocessing``'s own, but not for the storage behind a virtual tensor.

    It would arrive as one of the CPU. RuntimeError: send the tensor.
    """
    if hasattr(storage, "_vgpu_block"):
        raise RuntimeError(
            "the storage of a tensor on a virtual GPU cannot be sent to another process: "
            "send the tensor itself"
        )
    return reductions.reduce_storage(storage)


def install(changes: Changes) -> None:
    table = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    changes.item(table, VirtualTensor, reduce_tensor)
    changes.item(table, torch.UntypedStorage, reduce_storage)
