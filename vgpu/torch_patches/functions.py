"""Functions and classes in torch that C++ handles without an operator, so dispatch never sees them.

Examples are ``torch.accelerator``, Generator, Stream and Event, and what ``nn.DataParallel`` calls.
A function belongs here if it compares or names devices, or checks a tensor's class, before it calls
an operator. Operators (``torch.ops.aten``) and tensor methods belong in ``vgpu/tensor``, and names
in ``torch.vgpu`` belong in ``device_module.py``.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
import torch.nn.utils.clip_grad
import torch.utils._foreach_utils
from torch import nn
from torch._utils import _get_device_index, _handle_complex
from torch.nn.parallel import comm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._device import _device_constructors

from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.tensor import autocast as casting
from vgpu.tensor.methods import cpp_device, naming_devices
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time import recording
from vgpu.torch_patches import device_module
from vgpu.torch_patches.undo import Changes

# Functions that compare devices in C++ before they reach a kernel: first those that can be
# overridden (__torch_function__), then the rest.
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CHECK_IN_CPP = ("grid_sampler", "tensor_split")
_ALSO_IN_CPP = (
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch.Tensor, "__dlpack__"),
    (torch.Tensor, "new"),
    (torch.autograd, "_engine_run_backward"),
)

# Functions behind torch.accelerator, whose C++ part knows only one device and no streams.
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
_PlainStream, _PlainEvent = torch.Stream, torch.Event


def make_stream(*args: Any, **kwargs: Any) -> torch.Stream:
    """Create what ``torch.Stream(device, priority)`` returns while virtual GPUs are enabled."""
    device = args[0] if args else kwargs.get("device")
    if "stream_id" in kwargs or not _is_virtual(device):
        return _PlainStream(*args, **kwargs)
    return device_module.Stream(
        device, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"}
    )


def make_event(device: Any = None, **options: Any) -> torch.Event:
    """Create what ``torch.Event(device, ...)`` returns while virtual GPUs are enabled."""
    return device_module.Event(**options) if _is_virtual(device) else _PlainEvent(device, **options)


def _is_virtual(device: Any) -> bool:
    """Whether a device is a virtual GPU; None or an index means the accelerator, which is one."""
    if device is None or isinstance(device, int):
        return True
    return gpus.resolve(torch.device(device)) is not None


# Classes that C++ can't instantiate for a virtual GPU.
_CLASSES: dict[str, Callable[..., Any]] = {
    "Generator": gpus.make_generator,
    "Stream": make_stream,
    "Event": make_event,
}


def install(changes: Changes) -> None:
    _install_accelerator(changes)
    constructors = _device_constructors()  # torch caches the list on the first call
    for name, make in (("as_tensor", as_tensor), ("asarray", asarray)):
        changes.wrap_function(name, make, torch, for_classes=False)
        changes.add(constructors, getattr(torch, name))
    changes.wrap_function("ctc_loss", ctc_loss, torch)
    changes.wrap(torch.UntypedStorage, "resize_", resize_storage)
    for lazy in (UninitializedParameter, UninitializedBuffer):
        changes.wrap(lazy, "__new__", without_size)
    for name in _CHECK_IN_CPP:
        changes.wrap_function(name, naming_devices, torch, torch._VF)
    for name in _RECURRENT:
        changes.wrap_function(name, recurrent, torch, torch._VF)
    for owner, name in _ALSO_IN_CPP:
        changes.wrap(owner, name, naming_devices)
    changes.append(_foreach_supported_types, VirtualTensor)  # tensor/shapes.py adds ShapeTensor
    for owner in (torch.utils._foreach_utils, torch.nn.utils.clip_grad):
        changes.wrap(owner, "_has_foreach_support", _of_plain_tensors)
    changes.wrap(torch._C, "_group_tensors_by_device_and_dtype", _grouping_by_name)
    _install_data_parallel(changes)


def _install_accelerator(changes: Changes) -> None:
    for name, function in _FUNCTIONS.items():
        changes.set(torch._C, name, function)
    for name, make in _CLASSES.items():
        changes.wrap(torch, name, functools.partial(stand_in_for, make=make))
    # torch looks for CUDA and MPS first, but users who enable virtual GPUs expect it to find these.
    for module in (torch._utils, sys.modules["torch.nn.parallel.data_parallel"]):
        changes.set(module, "_get_available_device_type", lambda: gpus.DEVICE_TYPE)
    for name in ("amp", "memory", "nvtx", "random"):  # for "from torch.vgpu.amp import ..."
        module = getattr(device_module, name)
        changes.item(sys.modules, f"torch.{gpus.DEVICE_TYPE}.{name}", module)


def stand_in_for(torch_class: Any, make: Callable[..., Any]) -> Any:
    """Return a class that replaces one of torch's.

    Calling it calls ``make``; ``isinstance`` and ``issubclass`` use torch's class; subclasses can
    be defined and instantiated as usual.
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

    # __module__ is where pickle finds the class, not where torch's class is defined.
    stand_in = Meta(torch_class.__name__, (torch_class,), {"__module__": "torch"})
    return stand_in


def recurrent(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.lstm`` and the like to apply autocast and name virtual devices in C++ errors."""
    return casting.recurrent(naming_devices(plain))


def as_tensor(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``torch.as_tensor``: C++ would make a copy, because it compares C++ devices."""

    @functools.wraps(plain)
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        if isinstance(data, VirtualTensor):
            return data.to(device=data.device if device is None else device, dtype=dtype)
        return plain(data, dtype=dtype, device=device)

    return as_tensor


def asarray(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``torch.asarray``, for the same reason as ``torch.as_tensor``."""
    named = naming_devices(plain)

    @functools.wraps(plain)
    def asarray(obj: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if isinstance(obj, VirtualTensor) and cpp_device(device) == obj._gpu.cpp_device:
            device = obj._gpu.cpp_device
        return named(obj, device=device, **options)

    return asarray


def ctc_loss(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``torch.ctc_loss``: C++ copies lengths to the CPU only for its own device types."""

    @functools.wraps(plain)
    def ctc_loss(log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> torch.Tensor:
        if isinstance(log_probs, VirtualTensor):
            lengths = tuple(x.tolist() if isinstance(x, torch.Tensor) else x for x in lengths)
        return plain(log_probs, targets, *lengths, **options)

    return ctc_loss


def resize_storage(
    plain: Callable[..., torch.UntypedStorage],
) -> Callable[..., torch.UntypedStorage]:
    """Wrap ``UntypedStorage.resize_`` so that it also updates a virtual GPU's byte count."""

    @functools.wraps(plain)
    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
        block: Block | None = getattr(storage, "_vgpu_block", None)
        if block is not None:
            block.resize(size_bytes, "resize_")  # first, because the new size may not fit
        return plain(storage, size_bytes)

    return resize_


def without_size(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``__new__`` of uninitialized parameters and buffers to reject virtual GPUs.

    Moving a lazy module there raises torch's error: "Attempted to use an uninitialized parameter".
    """

    @functools.wraps(plain)
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = torch.empty(0, device=kwargs.get("device")).device
        if gpus.resolve(device) is not None:
            raise RuntimeError(
                f"a lazy module cannot be created on {device}, a virtual GPU: create it on the "
                "CPU, call it with a batch there to initialize its parameters, then move it"
            )
        return plain(cls, *args, **kwargs)

    return __new__


# Optimizers and gradient clipping have two implementations: a loop and ``torch._foreach_*``. By
# default, they use the latter on a GPU if they know the classes of all tensors.


def _of_plain_tensors(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the check for whether torch uses ``foreach`` for tensors by default.

    Gradient clipping uses it for plain tensors, such as gradients, but not for Parameters; here,
    both are VirtualTensors.
    """

    @functools.wraps(plain)
    def _has_foreach_support(tensors: list[Any], device: torch.device) -> bool:
        others = [tensor for tensor in tensors if not _is_plain(tensor)]
        return plain(others, device)

    return _has_foreach_support


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, VirtualTensor) and not isinstance(tensor, nn.Parameter)


def _grouping_by_name(plain: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
    """Wrap the grouping of tensors for ``foreach``, whose keys have the C++ names of devices."""

    @functools.wraps(plain)
    def grouped(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        groups = plain(*args, **kwargs)
        return {(d and gpus.shown(d), dtype): group for (d, dtype), group in groups.items()}

    return grouped


# ``nn.DataParallel``: copies between GPUs, streams and threads
#
# ``scatter``, ``gather``, ``broadcast_coalesced`` and ``reduce_add`` replace the functions of the
# same name in ``torch.nn.parallel.comm``, whose C++ code supports only CUDA; autograd's
# ``Scatter``, ``Gather`` and ``Broadcast`` call them. In a recording of virtual time, a broadcast
# or reduce costs the same as NCCL's, which torch uses on CUDA.

_plain_reduce_add = comm.reduce_add


def _install_data_parallel(changes: Changes) -> None:
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
    targets = [_gpu_device(d) for d in devices]
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
    target = torch.device("cpu") if index == -1 else _gpu_device(index)
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
    targets = [_gpu_device(device) for device in devices]
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


def _gpu_device(index_or_device: Any) -> torch.device:
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
