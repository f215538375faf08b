"""Operators that torch does not have itself: ``torch.library.custom_op``, ``Library``, extensions.

One whose kernel is Python runs it on virtual tensors, as a GPU would: the body sees the virtual
device, and what it computes, draws and allocates is computed, drawn and allocated there. A kernel
in C++ would read memory that a virtual tensor does not have: the CPU's runs, on the values.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library import utils

from vgpu.tensor.operations import compute, unwrap
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.rules import decompose, gpu_kernel, is_composite
from vgpu.tensor.tensor import VirtualTensor
from vgpu.torch_patches.undo import Changes


def install(changes: Changes) -> None:
    changes.wrap(utils, "_c_check_aliasing_constraint", comparing_values)
    changes.wrap(torch.library.Library, "impl", for_cpp_device)


def run(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator of another namespace than torch's own."""
    key = gpu_kernel(func)
    if key is not None:
        with _as_called(func):
            return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
    return (decompose if is_composite(func) else compute)(func, args, kwargs)


@contextmanager
def _as_called(func: Operator) -> Iterator[None]:
    """In the block C++ does what it would do for a kernel on a GPU: autocast, versions of views.

    All that is switched off where Python dispatch has brought us, and back on here, but for
    autograd where the operator has a formula. Without one autograd goes through the kernel's parts.
    """
    includes = torch._C._dispatch_tls_local_include_set()
    excludes = torch._C._dispatch_tls_local_exclude_set()
    if excludes.has(torch._C.DispatchKey.PythonTLSSnapshot):
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            excludes = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(includes, excludes):
        if any(_has_kernel(func.name(), key) for key in _AUTOGRAD):
            with torch._C._AutoDispatchBelowAutograd():
                yield
        else:
            yield


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_AUTOGRAD = ("Autograd", "AutogradLazy")


def comparing_values(plain: Callable[..., None]) -> Callable[..., None]:
    """torch's check that a result is no alias, which reads storages; virtual ones are inside."""

    @functools.wraps(plain)
    def _c_check_aliasing_constraint(
        name: str, args: Args, kwargs: Kwargs, result: Any, *rest: Any
    ) -> None:
        values = [result] if isinstance(result, VirtualTensor) else result
        if isinstance(values, list | tuple):
            values = tuple(unwrap(values, None, False)[0])
        given = tuple(unwrap(args, None, False)[0])
        named = dict(zip(kwargs, unwrap(kwargs.values(), None, False)[0], strict=True))
        plain(name, given, named, values, *rest)

    return _c_check_aliasing_constraint


def for_cpp_device(plain: Callable[..., None]) -> Callable[..., None]:
    """``Library.impl``; what a GPU does for autograd is asked for by C++'s name of the device."""

    @functools.wraps(plain)
    def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        plain(library, op_name, fn, dispatch_key, **options)
        if dispatch_key == "AutogradPrivateUse1":
            plain(library, op_name, fn, "AutogradLazy", **options)

    return impl
