"""Products with a wider result than their factors, ``torch.mm(a, b, out_dtype=torch.float32)``.

Only cuBLAS has them. ``F.linear_cross_entropy`` takes them on CUDA, and sums in float32 where the
GPU's matrix units take the input's type; virtual GPUs go the same way through it.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import linear_cross_entropy, linear_cross_entropy_options

from vgpu.changes import Changes
from vgpu.memory import gpus
from vgpu.tensor.operations import unwrap
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, named_arguments
from vgpu.tensor.same_device import check_for
from vgpu.tensor.tensor import wrap

_NEEDED = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}  # compute capability


def product(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    dtype, out = named.pop("out_dtype"), named.pop("out", None)
    values, gpu, mixed = unwrap((*named.values(), out), None, False)
    assert gpu is not None, "no virtual tensor among the arguments"
    if mixed:
        check_for(func)(func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    factor = next(value for key, value in named.items() if key in ("mat2", "batch2")).dtype
    if dtype is not factor and (dtype is not torch.float32 or factor not in _NEEDED):
        raise RuntimeError(
            f"out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs: {name} of "
            f"{factor} cannot give {dtype}"
        )
    wide = [value.to(dtype) if isinstance(value, torch.Tensor) else value for value in values]
    result = getattr(torch.ops.aten, name).default(**dict(zip(named, wide[:-1], strict=True)))
    if out is None:
        return wrap(result, gpu, name)
    if out.shape != result.shape or out.dtype is not dtype:
        raise RuntimeError(
            f"Expected out tensor to have dtype {dtype} and size {list(result.shape)}, but got "
            f"{out.dtype} and {list(out.shape)}: {name} with out_dtype= resizes nothing here"
        )
    out._inner.copy_(result)
    return out


HANDLERS: dict[str, Handler] = {
    f"aten::{name}.{overload}": product
    for name in ("mm", "bmm", "addmm", "baddbmm")
    for overload in ("dtype", "dtype_out")
}


def install(changes: Changes) -> None:
    context = linear_cross_entropy._ChunkContext
    options = linear_cross_entropy_options.LinearCrossEntropyOptions
    changes.set(options, "_resolve_auto_acc_dtype", staticmethod(_summing_in(options)))
    changes.set(context, "build", classmethod(_for_virtual_gpus(context.build)))


def _summing_in(options: Any) -> Callable[..., torch.dtype | None]:
    plain: Callable[..., torch.dtype | None] = options._resolve_auto_acc_dtype

    @functools.wraps(plain)
    def _resolve_auto_acc_dtype(
        dtype: torch.dtype, device: torch.device | None
    ) -> torch.dtype | None:
        gpu = None if device is None else gpus.resolve(device)
        if gpu is None:
            return plain(dtype, device)
        able = dtype in _NEEDED and gpu.spec.compute_capability >= _NEEDED[dtype]
        return torch.float32 if able else None

    return _resolve_auto_acc_dtype


def _for_virtual_gpus(method: Any) -> Callable[..., Any]:
    """torch's own function, which asks whether ``device.type`` is "cuda", asking for our name."""
    plain = method.__func__
    names = tuple(gpus.DEVICE_TYPE if one == "cuda" else one for one in plain.__code__.co_consts)
    assert names != plain.__code__.co_consts, "linear_cross_entropy no longer asks for cuda"
    ours = types.FunctionType(plain.__code__.replace(co_consts=names), plain.__globals__)
    ours.__defaults__ = plain.__defaults__

    @functools.wraps(plain)
    def build(cls: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        virtual = input.device.type == gpus.DEVICE_TYPE
        return (ours if virtual else plain)(cls, input, *args, **kwargs)

    return build
