"""Kernels that C++ calls for virtual GPUs if no argument is virtual or Python dispatch is off.

Operators that need special treatment aren't registered here; they have handlers instead. All files
with handlers are imported here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._library import utils

from vgpu.memory import gpus
from vgpu.tensor import (  # noqa: F401
    autocast,
    copies,
    cuda_kernels,
    parts,
    refusals,
)
from vgpu.tensor.operators import Args, Kwargs, Operator, is_composite, overloads
from vgpu.tensor.tensor import VirtualTensor, run, unwrap
from vgpu.torch_patches.undo import Changes

# The dispatch keys for factory calls on "vgpu:k", and on "vgpu", the current device (gpus.py).
_FACTORY_KEYS = ("PrivateUse1", gpus.CURRENT_DEVICE_TYPE.upper())
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def install(changes: Changes) -> None:
    kernels = changes.library("aten")
    kernels.impl("_pin_memory", copies.pin_cpu_memory, "CPU")
    kernels.impl("is_pinned", copies.is_cpu_pinned, "CPU")
    changes.wrap(utils, "_c_check_aliasing_constraint", comparing_values)
    changes.wrap(torch.library.Library, "impl", for_cpp_device)
    autocast.install(changes)


@functools.cache
def register_once() -> tuple[torch.library.Library, ...]:
    """Register ``run`` for the dispatch keys of our backends.

    Nothing else uses these keys, so the registrations stay when virtual GPUs are disabled; calls
    then raise an error that says so.
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
