"""CPU computation on the values inside virtual tensors, and random number generators."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operators import Args, Kwargs, Operator, OperatorInfo

# Computing


# C++ resolves lazy conjugation and negation before it calls Python. Kernels that consist of
# multiple operators rely on that for their parts, too, so it's turned back on for CPU kernels.
_resolving = torch._C._SetExcludeDispatchKeyGuard
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def compute(
    info: OperatorInfo,
    args: Args,
    inner_args: list[Any],
    inner_kwargs: Kwargs,
    gpu: VirtualGPU | None,
) -> Any:
    """Return the operator's results, computed on the CPU.

    ``inner_args`` and ``inner_kwargs`` have CPU tensors in place of virtual ones.
    """
    func = info.func
    if info.unchanged:
        return func(*inner_args, **inner_kwargs)
    if info.draws and gpu is not None:
        return _draw(info, inner_args, inner_kwargs, gpu)
    if info.writes_lists:
        return counting_versions(func, args, inner_args, inner_kwargs, info.writes_lists)
    if info.convolves and inner_args[0].dtype is torch.float16:
        return _in_float32(func, inner_args)
    if any(_is_complex(value) for value in inner_args):
        with _resolving(_CONJUGATE, False), _resolving(_NEGATIVE, False):
            return func(*inner_args, **inner_kwargs)
    return func(*inner_args, **inner_kwargs)


def _draw(
    info: OperatorInfo, inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU
) -> Any:
    """Run an operator that draws random numbers, with the call's generator or the GPU's default."""
    if info.with_generator is None:  # operators that draw without one have handlers
        return info.func(*inner_args, **inner_kwargs)
    generator = gpus.generator_for(gpu, inner_kwargs.get("generator"))
    return info.with_generator(*inner_args, **{**inner_kwargs, "generator": generator})


def counting_versions(
    func: Operator,
    args: Args,
    inner_args: list[Any],
    inner_kwargs: Kwargs,
    positions: Iterable[int],
) -> Any:
    """Run an operator that modifies the lists of tensors at ``positions`` in place.

    C++ increments the version of a single tensor that is modified in place, but not the versions of
    tensors in a list. Here, each tensor in a list gets as many increments as an alias of its
    values.
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
    """Run a float16 convolution in float32, the dtype in which GPUs accumulate.

    The CPU's float16 kernel is 50 times slower.
    """

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


def set_inner_device(inner_kwargs: Kwargs, gpu: VirtualGPU | None) -> VirtualGPU | None:
    """Replace ``device=`` with the CPU; return the result's GPU, or None for a real device."""
    device = inner_kwargs.get("device")
    if device is None:
        return gpu
    target = gpus.resolve(device)
    if target is not None:
        inner_kwargs["device"] = "cpu"
        inner_kwargs.pop("pin_memory", None)
    return target


# The host's memory, which may be smaller than the GPU's


def require_room(inner_args: Sequence[Any], inner_kwargs: Kwargs, gpu: VirtualGPU) -> None:
    """Raise torch.OutOfMemoryError before the CPU allocates more memory than the GPU has left."""
    # A factory's first argument is the size, or a tensor (``*_like``), perhaps followed by the
    # size.
    first = size = inner_args[0] if inner_args else None
    if isinstance(first, torch.Tensor) and len(inner_args) > 1:
        size = inner_args[1]
    if not isinstance(size, list) or not all(isinstance(number, int) for number in size):
        return
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.get_default_dtype()
    dtype = inner_kwargs.get("dtype") or dtype
    gpu.memory.require(math.prod(size) * dtype.itemsize)


def refuse_host_memory(error: RuntimeError, gpu: VirtualGPU) -> None:
    """Raise the GPU's torch.OutOfMemoryError if the CPU's allocator failed to allocate a result."""
    found = _HOST_REFUSAL.search(str(error))
    if found is not None:
        size_bytes = int(found[1])
        gpu.memory.require(size_bytes)
        raise torch.OutOfMemoryError(gpu.memory.out_of_host_memory(size_bytes)) from None


_HOST_REFUSAL = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")
