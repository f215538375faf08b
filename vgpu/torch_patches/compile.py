"""``torch.compile`` on virtual GPUs: the original function runs, operator by operator.

TorchInductor can't generate code for virtual GPUs, and TorchDynamo doesn't trace through their
tensors. So a call that computes on virtual GPUs runs the original function, with the same results
as without ``torch.compile``. The first such call warns, and a recording of virtual time counts the
call and its backward as compiled (vgpu/time/compiler_passes.py); neither happens with the backends
"eager" and "aot_eager", which don't fuse operators. ``torch.compiler.is_compiling()`` is False
during the call. A call with only CPU tensors is compiled as usual.

Whether a call computes on virtual GPUs is determined from its arguments, from the module or object
that the function is a method of, and from the variables that the function uses: their tensors,
devices, modules, optimizers and other objects, a few levels deep. If no tensor or device is found,
the original function runs.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.tensor.refusals import is_virtual_device
from vgpu.tensor.tensor import VirtualTensor
from vgpu.time.recording import compiled as counted_as_compiled
from vgpu.torch_patches.undo import Changes

# Backends that run a graph's operators one by one, even on GPUs.
_AS_THEY_ARE = ("eager", "aot_eager")

_has_said = False


def install(changes: Changes) -> None:
    global _has_said
    _has_said = False
    changes.wrap(torch, "compile", _compile)
    changes.when_imported("torch._dynamo.trace_rules", _skip_own_files)
    changes.when_imported("triton.runtime.driver", _refuse_triton)


def _skip_own_files(module: ModuleType, changes: Changes) -> None:
    """Make Dynamo run this package's code untraced; Dynamo itself calls ``current_stream``."""
    module.add("vgpu")
    changes.callback(module.SKIP_DIRS.remove, module.SKIP_DIRS[-1])


def _refuse_triton(module: ModuleType, changes: Changes) -> None:
    """Say what a Triton kernel needs, instead of "0 active drivers", on a machine without a GPU."""

    def make(plain: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(plain)
        def _create_driver() -> Any:
            try:
                return plain()
            except RuntimeError as error:
                # NotImplementedError is a RuntimeError, so code that expects one still catches it.
                raise NotImplementedError(
                    "Triton kernels need a real GPU and are not supported on virtual GPUs: use a "
                    "version of the operation that calls PyTorch's operators"
                ) from error

        return _create_driver

    changes.wrap(module, "_create_driver", make)


def _compile(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = plain(model, *args, **kwargs)
        # ``plain`` returned a decorator, which will call ``compile`` again, or did nothing.
        if model is None or compiled is model:
            return compiled
        fuses = kwargs.get("backend") not in _AS_THEY_ARE
        # An OptimizedModule; a copy of it initializes itself again, with the same context.
        if isinstance(compiled, torch.nn.Module):
            module: Any = compiled
            module.dynamo_ctx = _Context(module.dynamo_ctx, fuses)
            module._initialize()
            return module
        return _by_device(compiled, model, fuses)

    return compile


class _Context:
    """A Dynamo context that turns a module's ``__call__`` into a compiled function."""

    def __init__(self, plain: Callable[..., Any], fuses: bool) -> None:
        self._plain = plain
        self._fuses = fuses

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _by_device(self._plain(function), function, self._fuses)


def _by_device(
    compiled: Callable[..., Any], plain: Callable[..., Any], fuses: bool
) -> Callable[..., Any]:
    """Return a function that calls ``plain`` for virtual GPUs, and otherwise ``compiled``."""

    # The function keeps the attributes of ``compiled``, by which Dynamo finds it inside another
    # call.
    @functools.wraps(compiled)
    def by_device(*args: Any, **kwargs: Any) -> Any:
        if not _is_virtual_call(plain, args, kwargs):
            return compiled(*args, **kwargs)
        if not fuses:
            return plain(*args, **kwargs)
        _say_once(plain)
        with counted_as_compiled():
            return plain(*args, **kwargs)

    return by_device


def _say_once(function: Callable[..., Any]) -> None:
    global _has_said
    if not _has_said:
        _has_said = True
        name = getattr(function, "__qualname__", type(function).__name__)
        warnings.warn(
            f"torch.compile on virtual GPUs: {name} runs uncompiled, operator by operator, with "
            "the same results; a recording of virtual time counts it as compiled. This is true for "
            "all compiled functions and is shown only once",
            stacklevel=3,
        )


# Does a call compute on virtual GPUs?

_DEPTH = 5


def _is_virtual_call(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    found_any = False
    for is_virtual in _places((args, kwargs, function), _DEPTH, set()):
        if is_virtual:
            return True
        found_any = True
    return not found_any


def _places(value: Any, depth: int, seen: set[int]) -> Iterator[bool]:
    """Yield, for each tensor and device in ``value``, whether it's on, or is, a virtual GPU."""
    if isinstance(value, torch.Tensor):
        yield isinstance(value, VirtualTensor) or is_virtual_device(value.device)
    elif isinstance(value, torch.device):
        yield is_virtual_device(value)
    elif isinstance(value, str):
        if value.partition(":")[0] == gpus.DEVICE_TYPE:
            yield True
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value):
            yield from _places(part, depth - 1, seen)


def _parts(value: Any) -> Iterable[Any]:
    """Return the values inside ``value`` in which to look for tensors and devices."""
    if isinstance(value, torch.nn.Module):
        return (*value.parameters(), *value.buffers())
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, FunctionType):
        return _variables(value)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, ModuleType | type):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _variables(function: FunctionType) -> Iterator[Any]:
    """Yield a function's defaults, string constants, and values of nonlocal and global variables.

    Global variables and constants include those of the functions defined inside it.
    """
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        if cell != _EMPTY_CELL:
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        yield from (const for const in code.co_consts if isinstance(const, str))
        names = function.__globals__
        yield from (names[name] for name in code.co_names if name in names)


_EMPTY_CELL = CellType()
