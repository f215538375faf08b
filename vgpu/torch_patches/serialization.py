"""Save and load tensors on virtual GPUs, and send them to other processes.

Files have the same format as CUDA checkpoints: storages are tagged with their device (``vgpu:1``),
so ``map_location`` and ``weights_only=True`` work as usual, and a file can be read without this
package if it's mapped to the CPU. A storage itself can't be on a virtual GPU, so a loaded storage
is marked, and tensors that are rebuilt from it are wrapped.

With torch.multiprocessing, as with CUDA, a tensor arrives on the device that it was sent from, and
shares memory with the sender's tensor. The receiving process must have enabled virtual GPUs, and
counts the bytes as its own.
"""

import copyreg
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from vgpu.memory import gpus
from vgpu.tensor.methods import OWN_ATTRIBUTES
from vgpu.tensor.tensor import VirtualTensor, wrap
from vgpu.torch_patches.undo import Changes

# Comes before torch's own priorities, which start at 10.
_PRIORITY = 5


def install(changes: Changes) -> None:
    changes.wrap(torch._utils, "_rebuild_tensor", wrapping)
    entry = (_PRIORITY, tag, restore)
    torch.serialization.register_package(*entry)
    changes.callback(torch.serialization._package_registry.remove, entry)
    table = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    changes.item(table, VirtualTensor, reduce_tensor)
    changes.item(table, torch.UntypedStorage, reduce_storage)


def reduce(tensor: VirtualTensor) -> tuple[Any, ...]:
    """Return torch's function to rebuild the tensor, and its arguments, for ``__reduce_ex__``."""
    warn_if_has_hooks(tensor)
    state = {k: v for k, v in vars(tensor).items() if k not in OWN_ATTRIBUTES}
    if isinstance(tensor, torch.nn.Parameter):
        function: Any = torch._utils._rebuild_parameter
        args: tuple[Any, ...] = (tensor.data, tensor.requires_grad, OrderedDict())
        if state:
            return torch._utils._rebuild_parameter_with_state, (*args, state)
    elif tensor.layout is torch.strided and tensor.dtype not in torch.storage._new_dtypes():
        inner = tensor._inner.resolve_conj().resolve_neg()
        inner.untyped_storage()._vgpu_location = str(tensor.device)  # type: ignore[attr-defined]
        function, args = inner._reduce_ex_internal(2)
        args = (*args[:4], tensor.requires_grad, *args[5:])
    else:
        # Save it as a CPU tensor, as torch does for devices without storages; such a tensor is
        # always loaded onto the device that it was saved from.
        function = torch._utils._rebuild_device_tensor_from_cpu_tensor
        # A sparse tensor is loaded without requires_grad, as on the CPU.
        requires_grad = tensor.requires_grad and tensor.layout is torch.strided
        args = (tensor.detach().cpu(), tensor.dtype, str(tensor.device), requires_grad)
    if state:
        return torch._tensor._rebuild_from_type_v2, (function, VirtualTensor, args, state)
    return function, args


copyreg.pickle(VirtualTensor, reduce)


def tag(storage: Any) -> str | None:
    """Return the device tag for a storage, or None if it isn't on a virtual GPU."""
    return getattr(storage, "_vgpu_location", None)


def restore(storage: Any, location: str) -> Any:
    """Mark a loaded storage with the virtual GPU from its tag or ``map_location``."""
    if location.partition(":")[0] != gpus.DEVICE_TYPE:
        return None
    device = torch.serialization._validate_device(location, gpus.DEVICE_TYPE)
    storage._vgpu_home = gpus.resolve(device)
    return storage


def wrapping(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch._utils._rebuild_tensor`` to put tensors with a marked storage on its GPU.

    ``copy.copy`` calls it with the storage of a virtual tensor, whose block knows the GPU.
    """

    def _rebuild_tensor(storage: Any, storage_offset: int, size: Any, stride: Any) -> torch.Tensor:
        tensor = plain(storage, storage_offset, size, stride)
        untyped = storage._untyped_storage
        gpu = getattr(untyped, "_vgpu_home", None)
        if gpu is None and (block := getattr(untyped, "_vgpu_block", None)) is not None:
            gpu = gpus.resolve(block.memory.device)
        return tensor if gpu is None else wrap(tensor, gpu, "load")

    return _rebuild_tensor


# Other processes


def reduce_tensor(tensor: VirtualTensor) -> tuple[Any, ...]:
    """Return a function that rebuilds a tensor in the receiving process, and its arguments."""
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
    """Call ``torch.multiprocessing``'s own function.

    Raises RuntimeError for the storage of a virtual tensor, which would arrive on the CPU.
    """
    if hasattr(storage, "_vgpu_block"):
        raise RuntimeError(
            "the storage of a tensor on a virtual GPU cannot be sent to another process: "
            "send the tensor itself"
        )
    return reductions.reduce_storage(storage)
