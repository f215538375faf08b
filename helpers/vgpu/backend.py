"""Switches virtual GPUs on and off: the only file that touches torch's own state.

Two things cannot be undone, because torch allows each only once in a process: the name of the
device type (``torch.device("vgpu:0")`` stays valid), and with it that ``torch.accelerator`` names
``vgpu``. So ``torch.vgpu`` stays as well and then says that no device is available, as
``torch.cuda`` does on a machine without a GPU. Everything else goes through :class:`_Changes`.
"""

import contextlib
import dataclasses
import functools
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.nn.parallel.data_parallel
from torch.nn.parallel import comm as torch_comm
from torch.utils import backend_registration

from helpers.vgpu.device import generators, gpus
from helpers.vgpu.device.links import Link, get_link
from helpers.vgpu.device.specs import GPUSpec, get_spec
from helpers.vgpu.dispatch import autocast, device_names, handlers, refusals, rules
from helpers.vgpu.dispatch.tensor import VirtualTensor, dispatch
from helpers.vgpu.timing import recorder, streams
from helpers.vgpu.torch_api import comm, data_assignment, device_module, processes, serialization
from helpers.vgpu.torch_api.stand_ins import standing_for

_MISSING = object()


class _Changes(contextlib.ExitStack):
    """What was changed in torch, and how to undo it; the last change is undone first."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class, or add it."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        if before is _MISSING:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)

    def item(self, table: dict, key: Any, value: Any) -> None:
        """Replace an entry of a dict, or add it."""
        before = table.get(key, _MISSING)
        table[key] = value
        if before is _MISSING:
            self.callback(table.pop, key)
        else:
            self.callback(table.__setitem__, key, before)

    def library(self, namespace: str) -> torch.library.Library:
        """A library whose registrations go when the changes are undone."""
        library = torch.library.Library(namespace, "IMPL")
        self.callback(library._destroy)
        return library


_changes = _Changes()
_named = False


class Lab(contextlib.AbstractContextManager):
    """The virtual GPUs that one ``enable`` switched on; a context manager that disables them."""

    def __init__(self, before: tuple[int, GPUSpec, int] | None) -> None:
        self._before = before
        self.devices = [torch.device(gpus.DEVICE_TYPE, i) for i in range(gpus.device_count())]

    def disable(self) -> None:
        disable()

    def __exit__(self, *exc_info: object) -> None:
        """Back to what was before ``enable``: other virtual GPUs, or none."""
        global _settings
        if self._before is None:
            disable()
        else:
            _settings = self._before
            gpus.set_count(*_settings)

    def __repr__(self) -> str:
        name = gpus.by_index(0).spec.name if gpus.device_count() else "disabled"
        return f"<{len(self.devices)} virtual GPUs: {name}>"


_settings: tuple[int, GPUSpec, int] | None = None


def enable(
    count: int,
    gpu: str | GPUSpec = "V100",
    memory_bytes: int | None = None,
    link: str | Link | None = None,
) -> Lab:
    """Make ``count`` virtual GPUs available as devices ``vgpu:0`` to ``vgpu:count-1``.

    gpu: a preset of specs.py, or a GPUSpec. memory_bytes: capacity of each, in place of the
    preset's. link: between GPUs, of links.py, in place of the preset's. May be called again at
    any time; tensors stay on the devices that remain.
    """
    if not 1 <= count <= 127:
        raise ValueError(f"count must be 1 to 127 (torch numbers devices in 8 bits), got {count}")
    spec = get_spec(gpu)
    if link is not None:
        spec = dataclasses.replace(spec, link=get_link(link))
    capacity_bytes = spec.memory_bytes if memory_bytes is None else memory_bytes
    if capacity_bytes <= 0:
        raise ValueError(f"memory_bytes must be positive, got {memory_bytes}")
    global _settings
    before = _settings
    if before is None:
        _name_device_type()
        _install()
    _settings = (count, spec, capacity_bytes)
    gpus.set_count(*_settings)
    return Lab(before)


def disable() -> None:
    """Switch the virtual GPUs off and put back every name that ``enable`` replaced."""
    global _settings
    if _settings is None:
        return
    _changes.close()
    gpus.set_count(0, *_settings[1:])
    _settings = None


def is_enabled() -> bool:
    return _settings is not None


def _name_device_type() -> None:
    """Once per process: give PrivateUse1 its name and its module."""
    global _named
    if _named:
        return
    found = torch._C._get_privateuse1_backend_name()
    if found != "privateuseone":
        raise RuntimeError(
            f"torch's only place for a further device type is taken by {found!r}; "
            f"virtual GPUs need a process without it"
        )
    methods = {
        owner: set(vars(owner))
        for owner in (torch.Tensor, torch.nn.Module, torch.nn.utils.rnn.PackedSequence)
    }
    backend_registration._setup_privateuseone_for_python_backend(
        gpus.DEVICE_TYPE, backend_module=device_module
    )
    for owner, names in methods.items():
        for name in set(vars(owner)) - names:
            _methods.append((owner, name, vars(owner)[name]))
            delattr(owner, name)
    _named = True


# What torch generates for a new device type: Tensor.vgpu, Tensor.is_vgpu, Module.vgpu and so on.
_methods: list[tuple[Any, str, Any]] = []


def _install() -> None:
    for owner, name, value in _methods:
        _changes.set(owner, name, value)
    # For "from torch.vgpu.amp import ...".
    _changes.item(sys.modules, f"torch.{gpus.DEVICE_TYPE}.amp", device_module.amp)
    for name in ("scatter", "gather", "broadcast_coalesced", "reduce_add"):
        _changes.set(torch_comm, name, getattr(comm, name))
    _changes.set(torch.cuda.nccl, "is_available", _nccl_is_available)
    # torch asks for CUDA and MPS first; whoever enables virtual GPUs means those.
    for module in (torch._utils, sys.modules["torch.nn.parallel.data_parallel"]):
        _changes.set(module, "_get_available_device_type", lambda: gpus.DEVICE_TYPE)
    _changes.set(torch.nn.parallel._functions, "_get_stream", _copy_stream)
    _changes.set(torch.nn.parallel, "parallel_apply", _parallel_apply)
    for name in ("data_parallel", "parallel_apply"):
        module = sys.modules[f"torch.nn.parallel.{name}"]
        _changes.set(module, "parallel_apply", _parallel_apply)
    for name, function in _ACCELERATOR.items():
        _changes.set(torch._C, f"_accelerator_{name}", function)
    for name, make in (
        ("Generator", generators.make_generator),
        ("Stream", streams.make_stream),
        ("Event", streams.make_event),
    ):
        _changes.set(torch, name, standing_for(getattr(torch, name), make))
    _changes.set(torch, "as_tensor", _as_tensor)
    _changes.set(torch, "_has_compatible_shallow_copy_type", data_assignment.has_compatible_type)
    _changes.set(torch.Tensor, "data", data_assignment.data)
    _changes.set(
        torch.Tensor, "_make_wrapper_subclass", staticmethod(refusals.make_wrapper_subclass)
    )
    _changes.set(torch.nested, "nested_tensor", refusals.nested_tensor)
    _changes.set(torch.UntypedStorage, "__new__", refusals.new_untyped_storage)
    _changes.set(torch.autograd.forward_ad, "make_dual", refusals.make_dual)
    _changes.set(torch, "compile", refusals.refusing_virtual(torch.compile))
    for owner, name in _CHECK_IN_CPP:
        _changes.set(owner, name, device_names.naming_devices(getattr(owner, name)))
    _install_serialization()
    for kind, reduce in processes.REDUCERS.items():
        _changes.item(ForkingPickler._extra_reducers, kind, reduce)  # type: ignore[attr-defined]
    rules.use_handlers({**handlers.HANDLERS, **refusals.HANDLERS})
    _register_kernels()


def _install_serialization() -> None:
    rebuild = torch._utils._rebuild_tensor
    _changes.set(torch._utils, "_rebuild_tensor", serialization.wrapping(rebuild))
    registry = torch.serialization._package_registry
    entry = (serialization.PRIORITY, serialization.tag, serialization.restore)
    torch.serialization.register_package(*entry)
    _changes.callback(registry.remove, entry)


def _register_kernels() -> None:
    """Send to ``dispatch`` what reaches the two backends' keys without a virtual tensor."""
    fallbacks = _changes.library("_")
    for key in ("PrivateUse1", "SparsePrivateUse1", "SparseCsrPrivateUse1", "Lazy"):
        fallbacks.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), key)
    for key, refuse in refusals.FALLBACKS.items():
        fallbacks.fallback(refuse, key)
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels = _changes.library("aten")
    # torch.tensor() and list indices copy with Python dispatch switched off. Then fallbacks are not
    # looked up for Python tensors or below a dispatch mode: these operators need own entries.
    aten = torch.ops.aten
    for func in (aten.copy_.default, aten.empty.memory_format, aten.empty_strided.default):
        for key in ("PrivateUse1", "Lazy"):
            kernels.impl(func, functools.partial(_call, func), key)
    kernels.impl(aten._to_copy.default, functools.partial(_call, aten._to_copy.default), "Lazy")
    kernels.impl("_pin_memory", handlers.pin_cpu_memory, "CPU")
    kernels.impl("is_pinned", handlers.is_cpu_pinned, "CPU")
    autocast.register(kernels)


def _call(func, *args, **kwargs):
    return dispatch(func, args, kwargs)


_plain_nccl_is_available = torch.cuda.nccl.is_available


def _nccl_is_available(tensors: Any) -> bool:
    """Never for virtual tensors; torch's own warns where it was built without NCCL."""
    virtual = any(isinstance(tensor, VirtualTensor) for tensor in tensors)
    return not virtual and _plain_nccl_is_available(tensors)


_parallel_apply = recorder.sharing_the_interpreter(torch.nn.parallel.parallel_apply)
_plain_as_tensor = torch.as_tensor


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """``torch.as_tensor``; C++ would copy, because it compares its own name of the device."""
    if isinstance(data, VirtualTensor):
        return data.to(device=data.device if device is None else device, dtype=dtype)
    return _plain_as_tensor(data, dtype=dtype, device=device)


def _copy_stream(device: torch.device) -> torch.Stream | None:
    """The background stream for copies from the CPU, in ``torch.nn.parallel._functions``."""
    return None if device.type == "cpu" else device_module.Stream(device)


# Functions that compare devices in C++ before they reach any kernel.
_CHECK_IN_CPP = (
    (torch._VF, "lstm"),
    (torch._VF, "gru"),
    (torch._VF, "rnn_tanh"),
    (torch._VF, "rnn_relu"),
    (torch, "grid_sampler"),
    (torch, "tensor_split"),
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch.nn.functional, "scaled_dot_product_attention"),
    (torch.autograd, "_engine_run_backward"),
)

# Functions behind torch.accelerator; its C++ half knows one device, and no streams.
_ACCELERATOR = {
    "getDeviceIndex": gpus.current_index,
    "setDeviceIndex": gpus.exchange_index,
    "exchangeDevice": gpus.exchange_index,
    "maybeExchangeDevice": gpus.exchange_index,
    "getStream": device_module.current_stream,
    "setStream": device_module.set_stream,
    "synchronizeDevice": device_module.synchronize,
    "getMemoryInfo": device_module.mem_get_info,
    "emptyCache": device_module.empty_cache,
    "isAllocatorInitialized": device_module.is_available,
    "getDeviceStats": device_module.nested_memory_stats,
    "resetPeakStats": device_module.reset_peak_memory_stats,
}
