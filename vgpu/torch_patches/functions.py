"""Functions and classes in torch that C++ handles without an operator, so dispatch never sees them.

Examples are ``torch.accelerator``, Generator, Stream and Event. A function belongs here if it
compares or names devices, or checks a tensor's class, before it calls an operator. Operators
(``torch.ops.aten``) and tensor methods belong in ``vgpu/tensor``, and names in ``torch.vgpu``
belong in ``device_module.py``.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.clip_grad
import torch.utils._foreach_utils
from torch import nn
from torch.autograd.graph import Node
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._device import _device_constructors

from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.tensor import autocast as casting
from vgpu.tensor import views
from vgpu.tensor.methods import HELD, cpp_device, naming_devices
from vgpu.tensor.tensor import VirtualTensor
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
    constructors = _device_constructors()  # torch caches the list from the first call
    for name, make in (("as_tensor", as_tensor), ("asarray", asarray)):
        changes.wrap_function(name, make, torch, for_classes=False)
        changes.add(constructors, getattr(torch, name))
    changes.wrap_function("ctc_loss", ctc_loss, torch)
    changes.wrap(torch.Tensor, "data", data_across_devices)
    changes.wrap(torch, "_has_compatible_shallow_copy_type", has_compatible_type)
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


# ``tensor.data = other`` across devices, which ``Module.to`` uses to preserve parameter identity
#
# For CPU and CUDA tensors, torch replaces the contents of the C++ tensor. A virtual tensor has a
# different Python class and different dispatch keys, so here the two Python objects swap their C++
# tensors and classes.


def data_across_devices(plain: Any) -> property:
    """Return the property ``Tensor.data``, extended to virtual tensors."""

    def set(tensor: torch.Tensor, source: torch.Tensor) -> None:
        if _of_other_kind(tensor, source):
            become(tensor, source)
            return
        if isinstance(tensor, VirtualTensor) and tensor.layout is source.layout is torch.strided:
            torch._C._set_conj(tensor, source.is_conj())
            torch._C._set_neg(tensor, source.is_neg())
        plain.__set__(tensor, source)
        if isinstance(tensor, VirtualTensor) and isinstance(source, VirtualTensor):
            tensor.__class__ = source.__class__
            for name in HELD:
                setattr(tensor, name, getattr(source, name))
            tensor._given_data = True
            if type(tensor) is VirtualTensor:
                # They share memory, but changing one's shape later doesn't affect the other's.
                tensor._inner = source._inner.detach()

    return property(plain.__get__, set)


def has_compatible_type(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the check that ``input.data = from_`` works, which precedes moving parameters."""

    # The parameters must have torch's names: torch.compile compares the signatures.
    def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
        if _of_other_kind(input, from_):
            return input.layout is torch.strided and from_.layout is torch.strided
        return plain(input, from_)

    return _has_compatible_shallow_copy_type


def _of_other_kind(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether C++ considers the tensors to be of different types."""
    if isinstance(tensor, VirtualTensor) and isinstance(source, VirtualTensor):
        # The keys differ for shapes on the host and for inference tensors.
        strided = tensor.layout is source.layout is torch.strided
        return strided and _keys(tensor) != _keys(source)
    return isinstance(tensor, VirtualTensor) != isinstance(source, VirtualTensor)


def _keys(tensor: torch.Tensor) -> int:
    """Return the dispatch keys by which C++ compares two tensors, except those it can change."""
    keys = torch._C._dispatch_keys(tensor)
    for mark in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        keys = keys.remove(mark)
    return keys.raw_repr()


def become(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give ``tensor`` the class and contents of ``source``; it stays the same object.

    The two are of different kinds: only one is virtual, or a shape on the host, or an inference
    tensor. ``requires_grad`` and other attributes are kept; the gradient is moved to the same
    device. Raises RuntimeError if ``tensor`` isn't a leaf, or is the gradient of another tensor.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "assigning .data of another device type to a tensor that is not a leaf is not "
            "supported on virtual GPUs; use .to(device) instead"
        )
    if not tensor.requires_grad and (holders := views.holders_of(tensor)):
        raise RuntimeError(
            "assigning .data of another device type to the gradient of a tensor of size "
            f"{tuple(holders[0].size())} on {holders[0].device} is not supported on virtual GPUs: "
            "move that tensor; its gradient follows"
        )
    grad = tensor.grad
    if grad is not None:
        tensor.grad = None
    try:
        if grad is not None:
            become(grad, grad.detach().to(source.device))
        _swap(tensor, source)
    except RuntimeError:
        if grad is not None:
            if grad.device != tensor.device:
                become(grad, grad.detach().to(tensor.device))
            tensor.grad = grad
        raise
    if grad is not None:
        tensor.grad = grad


def _swap(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Exchange the contents of two tensors; if that fails, both are unchanged."""
    content: Any = source.data.requires_grad_(tensor.requires_grad)
    if not content.is_inference() and not tensor.is_inference():  # keep the version counter
        torch._C._increment_version([content] * tensor._version)
    node = _accumulates(tensor) if tensor.requires_grad and not tensor.is_inference() else None
    attributes = {name: value for name, value in vars(tensor).items() if name not in HELD}
    held = {name: value for name, value in vars(content).items() if name in HELD}
    new_class: type[torch.Tensor] = torch.Tensor
    if isinstance(tensor, torch.nn.Parameter):
        attributes["_is_param"] = True
        new_class = torch.nn.Parameter
    if held:
        new_class = type(content)
    # The other object now has the old contents, which a graph may still need.
    old_class, old_attributes = tensor.__class__, dict(vars(tensor))
    try:
        torch._C._swap_tensor_impl(tensor, content)
    except RuntimeError as error:
        if "weakrefs" not in str(error):
            raise
        raise RuntimeError(
            f"a tensor of size {tuple(tensor.size())} cannot move from {tensor.device} to "
            f"{source.device}: something in C++ refers to it, as torch.profiler does with "
            "record_shapes or with_flops. On virtual GPUs, move the model before the profiler "
            "begins."
        ) from None
    if node is not None:
        _refuse_backward(node)
    for target, kind, names in (
        (tensor, new_class, {**attributes, **held}),
        (content, old_class, old_attributes),
    ):
        target.__class__ = kind
        vars(target).clear()
        vars(target).update(names)
    # The hooks' dicts stay with the Python object; set them again in C++.
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)


def _accumulates(tensor: torch.Tensor) -> Node:
    """Return the node that accumulates the tensor's gradient in existing graphs."""
    with torch.inference_mode(False):
        return torch.autograd.graph.get_gradient_edge(tensor).node


def _refuse_backward(node: Node) -> None:
    """Make existing graphs raise an error: they'd accumulate gradients into the old contents."""

    def refuse(grad_outputs: Any) -> None:
        raise RuntimeError(
            "backward through a graph that was created before its parameters were moved to another "
            "device: run the forward pass again, or move the module before the forward pass"
        )

    node.register_prehook(refuse)
