"""What torch's C++ dispatcher calls for virtual GPUs where it asks no virtual tensor's Python.

An operator that needs a treatment of its own is not registered here: it gets a handler
(handlers.py) or a refusal (refusals.py).
"""

import functools
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.tensor import autocast as casting
from vgpu.tensor import custom, handlers, parts, refusals, rules
from vgpu.tensor.gpu_only import (
    attention,
    embedding_bag,
    half_to_float,
    half_types,
    log_sigmoid,
    norms,
    out_dtype,
    rms_norm,
)
from vgpu.tensor.operations import dispatch
from vgpu.tensor.operators import Operator, operator_of_aten, overloads
from vgpu.torch_patches.undo import Changes

rules.use_handlers(
    {
        **attention.HANDLERS,
        **embedding_bag.HANDLERS,
        **half_to_float.HANDLERS,
        **half_types.HANDLERS,
        **log_sigmoid.HANDLERS,
        **norms.HANDLERS,
        **out_dtype.HANDLERS,
        **rms_norm.HANDLERS,
        **handlers.HANDLERS,
        **refusals.HANDLERS,
    }
)
rules.use_parts({**half_to_float.PARTS, **parts.PARTS})
rules.use_for_foreign(custom.run)

# The keys of calls that have no tensor yet: of "vgpu:k", and of "vgpu", the current device (gpus.py).
_FACTORY_KEYS = ("PrivateUse1", gpus.CURRENT_DEVICE_TYPE.upper())
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def install(changes: Changes) -> None:
    kernels = changes.library("aten")
    kernels.impl("_pin_memory", handlers.pin_cpu_memory, "CPU")
    kernels.impl("is_pinned", handlers.is_cpu_pinned, "CPU")
    casting.install(changes)


@functools.cache
def register_once() -> tuple[torch.library.Library, ...]:
    """Send to ``dispatch`` what reaches the keys of our backends without a virtual tensor.

    Nothing else has these keys, so the registrations stay when virtual GPUs are disabled: then they
    say so.
    """
    fallbacks = torch.library.Library("_", "IMPL")
    for backend in _FACTORY_KEYS:
        for key in (backend, f"Sparse{backend}", f"SparseCsr{backend}"):
            fallbacks.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), key)
    fallbacks.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), "Lazy")
    for key, refuse in refusals.FALLBACKS.items():
        fallbacks.fallback(refuse, key)
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # torch.tensor() and list indices read and copy with Python dispatch switched off. Then
    # fallbacks are not looked up for Python tensors or below a dispatch mode: each operator needs
    # its own entry.
    kernels = torch.library.Library("aten", "IMPL")
    for func in _computing_operators():
        kernels.impl(func, functools.partial(_call, func), "Lazy")
    aten = torch.ops.aten
    # C++ would look for a kernel of kaiser_window for the device of the tensor that it makes.
    made_here = (
        *overloads(aten.kaiser_window),
        aten.empty.memory_format,
        aten.empty_strided.default,
    )
    for func in (aten.copy_.default, *made_here):
        for key in _FACTORY_KEYS:
            kernels.impl(func, functools.partial(_call, func), key)
    for name in half_to_float.PARTS:
        func = operator_of_aten(name.removeprefix("aten::"))
        kernels.impl(func, functools.partial(_divide, func), "AutogradLazy")
    casting.register(kernels)
    rms_norm.register(kernels)
    return fallbacks, kernels


def _computing_operators() -> list[Operator]:
    """The operators of ``aten`` that compute on the CPU by themselves, but for ``out=``."""
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
            if computes and not rules.is_composite(func) and not writes_out:
                found.append(func)
    return found


def _call(func: Operator, *args: Any, **kwargs: Any) -> Any:
    return dispatch(func, args, kwargs)


def _divide(func: Operator, *args: Any, **kwargs: Any) -> Any:
    return rules.rule_for(func).parts(func, args, kwargs)
