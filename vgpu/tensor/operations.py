"""What happens when torch computes with virtual tensors.

The devices are compared, the CPU computes with the values inside, and what comes out is put on the
GPU again.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor import tensor
from vgpu.tensor.generators import generator_for
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, argument
from vgpu.tensor.refusals import refuse_tangents
from vgpu.tensor.rules import Rule, rule_for
from vgpu.tensor.tensor import VirtualTensor, count_bytes, set_cpp_data, strided_parts, wrap

# C++ resolves lazy conjugation and negation before it calls us. Kernels that consist of several
# operators rely on that for their parts too, so it is switched on again below us.
_resolving = torch._C._SetExcludeDispatchKeyGuard
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def set_interceptor(interceptor: Handler | None) -> None:
    """Let ``interceptor`` run each operation in place of ``run``; None for ``run`` itself.

    It sees an operator that runs in parts as the operators that it consists of.
    """
    if interceptor is None:
        tensor.run_with(run)
        return
    intercepted = interceptor

    def intercept(func: Operator, args: Args, kwargs: Kwargs) -> Any:
        rule = rule_for(func)
        if rule.divides is not None and rule.divides(args, kwargs):
            return rule.parts(func, args, kwargs)
        return intercepted(func, args, kwargs)

    tensor.run_with(intercept)


def dispatch(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Where every operation on virtual tensors arrives."""
    return tensor.runner(func, args, kwargs)


def run(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run one operation: in parts, by its own handler, or by ``compute``."""
    rule = rule_for(func)
    if rule.divides is not None and rule.divides(args, kwargs):
        return rule.parts(func, args, kwargs)
    if rule.special is not None:
        return rule.special(func, args, kwargs)
    return _compute(rule, func, args, kwargs)


def compute(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Check the devices, compute on the values, and wrap the result."""
    return _compute(rule_for(func), func, args, kwargs)


def _compute(rule: Rule, func: Operator, args: Args, kwargs: Kwargs) -> Any:
    inner_args, gpu, mixed = unwrap(args, None, False)
    inner_kwargs = kwargs
    if kwargs:
        values, gpu, mixed = unwrap(kwargs.values(), gpu, mixed)
        inner_kwargs = dict(zip(kwargs, values, strict=True))
    if mixed:
        refuse_tangents((args, *kwargs.values()))
        rule.check(func, args, kwargs)
    if rule.makes_on_device:
        gpu = _set_inner_device(inner_kwargs, gpu)
        if gpu is not None:
            _require_room(inner_args, inner_kwargs, gpu)
    try:
        if rule.plain:
            result = func(*inner_args, **inner_kwargs)
        elif rule.draws and gpu is not None:
            result = _draw(rule, func, inner_args, inner_kwargs, gpu)
        elif rule.writes_lists:
            result = counting_versions(func, args, inner_args, inner_kwargs, rule.writes_lists)
        elif rule.convolves and inner_args[0].dtype is torch.float16:
            result = _in_float32(func, inner_args)
        elif rule.conjugates and any(_is_complex(value) for value in inner_args):
            with _resolving(_CONJUGATE, False), _resolving(_NEGATIVE, False):
                result = func(*inner_args, **inner_kwargs)
        else:
            result = func(*inner_args, **inner_kwargs)
    except RuntimeError as error:
        if rule.reshapes:  # it may have done so before it failed
            for changed in _written(rule, args, kwargs):
                refresh(changed, rule.name)
        if gpu is not None:
            _refuse_host_memory(error, gpu)
        raise
    if rule.aliases is not None:
        return _return_arguments(rule, rule.aliases, result, args, kwargs, gpu)
    if gpu is not None and type(result) is torch.Tensor:
        return wrap(result, gpu, rule.name)
    return wrap_result(result, gpu, rule.name)


# Into the CPU


def unwrap(
    values: Iterable[Any], gpu: VirtualGPU | None, mixed: bool
) -> tuple[list[Any], VirtualGPU | None, bool]:
    """The values with CPU tensors in place of virtual ones, the GPU, and whether others mix in.

    The GPU is the first one. ``gpu`` and ``mixed`` are what earlier values gave. ``mixed`` becomes
    True where tensors of another device, virtual or not, are among the values.
    """
    inner = []
    for value in values:
        kind = type(value)
        if kind is VirtualTensor:
            if value._gpu is not gpu:
                mixed = mixed or gpu is not None
                gpu = gpu or value._gpu
            value = value._inner
        elif kind is list or kind is tuple:
            value, gpu, mixed = unwrap(value, gpu, mixed)
        elif isinstance(value, torch.Tensor):
            mixed = True
        inner.append(value)
    return inner, gpu, mixed


def _set_inner_device(inner_kwargs: Kwargs, gpu: VirtualGPU | None) -> VirtualGPU | None:
    """Turn ``device=`` into the CPU's; returns the GPU of the result, None for a real device."""
    device = inner_kwargs.get("device")
    if device is None:
        return gpu
    target = gpus.resolve(device)
    if target is not None:
        inner_kwargs["device"] = "cpu"
        inner_kwargs.pop("pin_memory", None)
    return target


def _require_room(inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU) -> None:
    """Raise torch.OutOfMemoryError before the CPU is asked for room that the GPU does not have."""
    # Factories start with the size, or with a tensor to take after and perhaps the size.
    first = size = inner_args[0] if inner_args else None
    if isinstance(first, torch.Tensor) and len(inner_args) > 1:
        size = inner_args[1]
    if not isinstance(size, list) or not all(isinstance(number, int) for number in size):
        return
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.get_default_dtype()
    dtype = inner_kwargs.get("dtype") or dtype
    gpu.memory.require(math.prod(size) * dtype.itemsize)


# On the CPU


def _draw(
    rule: Rule, func: Operator, inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU
) -> Any:
    """Run an operator that draws random numbers, from the generator of ``gpu``."""
    if rule.with_generator is None:  # an operator that does draw has a handler of its own
        return func(*inner_args, **inner_kwargs)
    generator = generator_for(gpu, inner_kwargs.get("generator"))
    return rule.with_generator(*inner_args, **{**inner_kwargs, "generator": generator})


def counting_versions(
    func: Operator,
    args: Args,
    inner_args: list[Any],
    inner_kwargs: Kwargs,
    positions: Iterable[int],
) -> Any:
    """Run an operator that changes the lists of tensors at ``positions``.

    C++ counts a new version of a single tensor that changes in place, but not of those in a list.
    Here each of those is counted as often as an alias of its values, which counts from zero.
    """
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in positions:
        inner_args[position] = [
            values if values.is_inference() else values.data for values in inner_args[position]
        ]
        changed += zip(args[position], inner_args[position], strict=True)
    try:
        with _resolving(_IN_PLACE_OR_VIEW, False):
            return func(*inner_args, **inner_kwargs)
    finally:
        for one, alias in changed:
            if not alias.is_inference():
                torch._C._increment_version([one] * alias._version)


def _in_float32(func: Operator, inner_args: Sequence[Any]) -> Any:
    """A float16 convolution, summed in float32 as a GPU does; the CPU's own takes 50 times as long."""

    def cast(values: Iterable[Any], dtype: torch.dtype, wider: torch.dtype) -> list[Any]:
        return [
            value.to(wider) if isinstance(value, torch.Tensor) and value.dtype is dtype else value
            for value in values
        ]

    result = func(*cast(inner_args, torch.float16, torch.float32))
    if isinstance(result, torch.Tensor):
        return result.to(torch.float16)
    return tuple(cast(result, torch.float32, torch.float16))


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _refuse_host_memory(error: RuntimeError, gpu: VirtualGPU) -> None:
    """Raise torch.OutOfMemoryError of the GPU where the CPU's allocator had no room for a result."""
    found = _HOST_REFUSAL.search(str(error))
    if found is not None:
        size_bytes = int(found[1])
        gpu.memory.require(size_bytes)
        raise torch.OutOfMemoryError(gpu.memory.out_of_host_memory(size_bytes)) from None


_HOST_REFUSAL = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")


# Back to the GPU


def wrap_result(result: Any, gpu: VirtualGPU | None, operation: str) -> Any:
    """Wrap each tensor of a result; numbers, and everything on a real device, stay as they are."""
    if isinstance(result, torch.Tensor):
        return result if gpu is None else wrap(result, gpu, operation)
    if isinstance(result, list | tuple):
        return type(result)([wrap_result(item, gpu, operation) for item in result])
    return result


def _return_arguments(
    rule: Rule,
    aliases: Sequence[tuple[int, str] | None],
    result: Any,
    args: Args,
    kwargs: Kwargs,
    gpu: VirtualGPU | None,
) -> Any:
    """The results of an in-place or ``out=`` call: the very arguments that it wrote to."""
    several = len(aliases) > 1
    outputs = []
    for alias, item in zip(aliases, result if several else (result,), strict=True):
        if alias is None:
            outputs.append(wrap_result(item, gpu, rule.name))
            continue
        written = argument(alias, args, kwargs)
        if rule.reshapes or written._inner.layout is not torch.strided:
            refresh(written, rule.name)
        outputs.append(written)
    return tuple(outputs) if several else outputs[0]


def _written(rule: Rule, args: Args, kwargs: Kwargs) -> list[VirtualTensor]:
    """The virtual tensors that a call writes to and hands back."""
    arguments = [argument(alias, args, kwargs) for alias in rule.aliases or () if alias]
    return [one for one in arguments if isinstance(one, VirtualTensor)]


def refresh(changed: VirtualTensor, operation: str) -> None:
    """Show the size, strides and bytes that the values have after an in-place operation."""
    values, gpu = changed._inner, changed._gpu
    for part in strided_parts(values):
        block = count_bytes(part, gpu, operation)
        try:
            block.resize(part.untyped_storage().nbytes(), operation)
        except torch.OutOfMemoryError:
            storage = part.untyped_storage()
            if part is values:  # back to its size from before the growth
                part.set_(storage, changed.storage_offset(), changed.size(), changed.stride())
            storage.resize_(block.size_bytes)
            raise
    set_cpp_data(changed, wrap(values, gpu, operation))


tensor.run_with(run)
