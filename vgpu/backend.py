"""``vgpu.enable`` and ``vgpu.disable``, and the registration of the device type with torch.

Each function in ``_PATCHES`` replaces names in torch; ``enable`` calls all of them, and ``disable``
reverts what they did. Two changes can't be undone, because torch allows each only once per process:
naming the device type, so ``torch.device("vgpu:0")`` stays valid, and making it the one that
``torch.accelerator`` reports. Tensors that are still on a virtual GPU keep working. ``torch.vgpu``
stays, too, and reports that no device is available, as ``torch.cuda`` does on a machine without a
GPU.
"""

import contextlib
import copyreg
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.parallel.data_parallel
from torch._library import utils
from torch.utils import backend_registration

from vgpu import torch_releases
from vgpu.collectives import dispatch, process_groups
from vgpu.hardware import GPUSpec, Link, get_link, get_spec
from vgpu.memory import gpus, snapshot
from vgpu.tensor import (
    autocast,
    copies,
    cuda_kernels,
    in_place,
    methods,
    parts,  # noqa: F401  it registers handlers
    refusals,
    shapes,
)
from vgpu.tensor.operators import Args, Kwargs, Operator, is_composite, overloads
from vgpu.tensor.tensor import VirtualTensor, run, unwrap
from vgpu.time.simulate import simulate
from vgpu.time.steps import Program
from vgpu.time.timeline import Timeline
from vgpu.torch_patches import (
    attention,
    compile,
    device_module,
    functions,
    serialization,
)
from vgpu.torch_patches.undo import Changes

_FREE_NAME = "privateuseone"
"""torch's name for its only out-of-tree device type, until it's renamed."""

_changes = Changes()
_Settings = tuple[int, GPUSpec, int]
_settings: _Settings | None = None
_named = False


class Lab(contextlib.AbstractContextManager["Lab"]):
    """The virtual GPUs that ``enable`` switched on; a context manager that undoes the call."""

    def __init__(self, before: _Settings | None) -> None:
        self._before = before
        self.devices = [torch.device(gpus.DEVICE_TYPE, i) for i in range(gpus.device_count())]

    def disable(self) -> None:
        disable()

    def __exit__(self, *exc_info: object) -> None:
        """Restore the state from before ``enable``: other virtual GPUs, or none."""
        _use(self._before)

    def __repr__(self) -> str:
        name = gpus.by_index(0).spec.name if gpus.device_count() else "disabled"
        return f"<{len(self.devices)} virtual GPUs: {name}>"


def enable(
    count: int,
    gpu: str | GPUSpec = "V100",
    memory_bytes: int | None = None,
    link: str | Link | None = None,
) -> Lab:
    """Make ``count`` virtual GPUs available as devices ``vgpu:0`` to ``vgpu:count-1``.

    ``gpu`` is the name of a preset in hardware.py (``vgpu.PRESETS``), or a GPUSpec.
    ``memory_bytes`` overrides the preset's memory per GPU. ``link``, a name in ``vgpu.LINKS`` or a
    Link, overrides its link between GPUs. ``enable`` can be called again at any time; tensors stay
    on the devices that remain. Raises ValueError for a count outside 1 to 127, an unknown preset,
    or a memory size that isn't positive, and TypeError for a non-integer.
    """
    count = _to_int(count, "count", "such as 4")
    if not 1 <= count <= 127:
        raise ValueError(
            f"count must be from 1 to 127 (torch stores a device's index in 8 bits), got {count}"
        )
    spec = get_spec(gpu)
    if link is not None:
        spec = dataclasses.replace(spec, link=get_link(link))
    capacity_bytes = spec.memory_bytes
    if memory_bytes is not None:
        capacity_bytes = _to_int(memory_bytes, "memory_bytes", "such as 16 * 2**30")
    if capacity_bytes <= 0:
        raise ValueError(f"memory_bytes must be positive, got {memory_bytes}")
    before = _settings
    _use((count, spec, capacity_bytes))
    return Lab(before)


def _to_int(number: int, name: str, example: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be an integer, {example}; got {number!r}") from None


def prepare() -> None:
    """Do the slowest part of ``enable`` ahead of time, without switching anything on.

    This is for a process from which others are forked: in each of them, ``enable`` then takes a
    tenth of the time.
    """
    if torch._C._get_privateuse1_backend_name() == _FREE_NAME:
        register_once()


def disable() -> None:
    """Switch virtual GPUs off and restore every name that ``enable`` replaced."""
    _use(None)


def is_enabled() -> bool:
    return _settings is not None


def _use(settings: _Settings | None) -> None:
    """Apply these settings; None switches virtual GPUs off."""
    global _settings
    if settings is not None and _settings is None:
        _name_device_type()
        _install()
    if settings is None and _settings is not None:
        _changes.close()
        snapshot.record_history(None)
        gpus.set_count(0, *_settings[1:])
    if settings is not None:
        gpus.set_count(*settings)
    _settings = settings


def _install() -> None:
    try:
        for owner, name, value in _methods:
            _changes.set(owner, name, value)
        for install in _PATCHES:
            with torch_releases.noting_missing(_changes.missing):
                install(_changes)
        torch_releases.report_missing(_changes.missing)
    except BaseException:
        _changes.close()
        raise


def _name_device_type() -> None:
    """Set PrivateUse1's name and module, once per process."""
    global _named
    if _named:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != _FREE_NAME:
        raise RuntimeError(
            f"torch supports only one out-of-tree device type (PrivateUse1), and {name!r} already "
            f"uses it: enable virtual GPUs in a process that doesn't load {name!r}"
        )
    methods = {
        owner: set(vars(owner))
        for owner in (torch.Tensor, torch.nn.Module, torch.nn.utils.rnn.PackedSequence)
    }
    backend_registration._setup_privateuseone_for_python_backend(
        gpus.DEVICE_TYPE, backend_module=device_module, device_guard=gpus.DeviceGuard()
    )
    for owner, names in methods.items():
        for name in set(vars(owner)) - names:
            _methods.append((owner, name, vars(owner)[name]))
            delattr(owner, name)
    register_once()
    _named = True


def _simulated_again(programs: tuple[Program, ...]) -> Timeline:
    """Name the device type, and simulate programs that were recorded in another process."""
    _name_device_type()
    return simulate(programs)


def _as_programs(timeline: Timeline) -> Any:
    """Pickle a timeline as its programs, to be simulated again after the device type is named.

    Virtual devices can't be unpickled before that.
    """
    if not timeline.programs:
        return timeline.__reduce_ex__(2)
    return _simulated_again, (timeline.programs,)


copyreg.pickle(Timeline, _as_programs)

# Methods that torch generates for a new device type: Tensor.vgpu, Tensor.is_vgpu, Module.vgpu etc.
_methods: list[tuple[Any, str, Any]] = []


# Kernels that C++ calls for virtual GPUs if no argument is virtual or Python dispatch is off
#
# Operators that need special treatment aren't registered here; they have handlers instead
# (``handler`` in tensor/operators.py).

# The dispatch keys for factory calls on "vgpu:k", and on "vgpu", the current device (gpus.py).
_FACTORY_KEYS = ("PrivateUse1", gpus.CURRENT_DEVICE_TYPE.upper())
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def _install_kernels(changes: Changes) -> None:
    kernels = changes.library("aten")
    kernels.impl("_pin_memory", copies.pin_cpu_memory, "CPU")
    kernels.impl("is_pinned", copies.is_cpu_pinned, "CPU")
    changes.wrap(utils, "_c_check_aliasing_constraint", comparing_values)
    changes.wrap(torch.library.Library, "impl", for_cpp_device)


@functools.cache
def register_once() -> tuple[torch.library.Library, ...]:
    """Register ``run`` for the dispatch keys of our backends.

    Nothing else uses these keys, so the registrations stay when virtual GPUs are disabled; calls
    then raise an error that tells you to enable them.
    """
    fallbacks = torch.library.Library("_", "IMPL")
    for backend in _FACTORY_KEYS:
        for key in (backend, f"Sparse{backend}", f"SparseCsr{backend}"):
            fallbacks.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), key)
    fallbacks.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "Lazy")
    for key, refuse in refusals.FALLBACKS.items():
        fallbacks.fallback(refuse, key)
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # torch.tensor() and indexing with lists read and copy with Python dispatch disabled. Fallbacks
    # are then not used for tensor subclasses or below a dispatch mode, so each operator needs its
    # own entry.
    kernels = torch.library.Library("aten", "IMPL")
    for func in _computing_operators():
        kernels.impl(func, functools.partial(_call, func), "Lazy")
    aten = torch.ops.aten
    # C++ looks up kaiser_window's kernel for the device of the tensor that it creates.
    made_here = (
        *overloads(aten.kaiser_window),
        aten.empty.memory_format,
        aten.empty_strided.default,
    )
    for func in (aten.copy_.default, *made_here):
        for key in _FACTORY_KEYS:
            kernels.impl(func, functools.partial(_call, func), key)
    cuda_kernels.register(kernels)
    autocast.register(kernels)
    return fallbacks, kernels


def _computing_operators() -> list[Operator]:
    """Return aten's operators with a CPU or all-device kernel, except ``out=`` variants."""
    found: list[Operator] = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for func in overloads(packet):
            full_name = func.name()
            if not torch._C._dispatch_has_kernel(full_name):
                continue
            computes = _has_kernel(full_name, "CPU") or _has_kernel(
                full_name, "CompositeExplicitAutograd"
            )
            writes_out = any(argument.is_out for argument in func._schema.arguments)
            if computes and not is_composite(func) and not writes_out:
                found.append(func)
    return found


def _call(func: Operator, *args: Any, **kwargs: Any) -> Any:
    return run(func, args, kwargs)


# Kernels registered by the user (custom_op, Library); operators.py runs them


def comparing_values(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's check that a result isn't an alias of an argument.

    It compares storages, so it gets the inner tensors.
    """

    @functools.wraps(plain)
    def _c_check_aliasing_constraint(
        name: str, args: Args, kwargs: Kwargs, result: Any, *rest: Any
    ) -> None:
        values = [result] if isinstance(result, VirtualTensor) else result
        if isinstance(values, list | tuple):
            values = tuple(unwrap(values, [], []))
        named = dict(zip(kwargs, unwrap(kwargs.values(), [], []), strict=True))
        plain(name, tuple(unwrap(args, [], [])), named, values, *rest)

    return _c_check_aliasing_constraint


def for_cpp_device(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Library.impl`` to also register our device's autograd kernels under its C++ name."""

    @functools.wraps(plain)
    def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        plain(library, op_name, fn, dispatch_key, **options)
        if dispatch_key == "AutogradPrivateUse1":
            plain(library, op_name, fn, "AutogradLazy", **options)

    return impl


_PATCHES = (
    attention.install,
    compile.install,
    cuda_kernels.install,
    dispatch.install,
    functions.install,
    in_place.install,
    _install_kernels,
    autocast.install,
    methods.install,
    process_groups.install,
    refusals.install,
    serialization.install,
    shapes.install,
)
