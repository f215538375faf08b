"""Operators that CUDA has for float16 and bfloat16 and the CPU has not: computed in float32, rounded.

The list is torch's own, of where ``dtypesIfCUDA`` has more than ``dtypes`` in
torch/testing/_internal/common_methods_invocations.py. In it but not here: Fourier transforms, and
``rrelu`` of float16, which stay errors of the CPU's.
"""

from typing import Any

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operations import compute, unwrap, wrap_result
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, named_arguments
from vgpu.tensor.same_device import check_for

HALF = (torch.float16, torch.bfloat16)


def widened(func: Operator, args: Args, kwargs: Kwargs) -> tuple[dict[str, Any], VirtualGPU]:
    """The arguments by name, CPU tensors in place of virtual ones, halves as float32; and the GPU."""
    named = named_arguments(func, args, kwargs)
    values, gpu, mixed = unwrap(named.values(), None, False)
    assert gpu is not None, "no virtual tensor among the arguments"
    if mixed:
        check_for(func)(func, args, kwargs)
    wide = [
        value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value
        for value in values
    ]
    return dict(zip(named, wide, strict=True)), gpu


def in_float32(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    dtype = args[0].dtype
    if kwargs or dtype not in HALF:  # out=
        return compute(func, args, kwargs)
    named, gpu = widened(func, args, kwargs)
    results = func(**named)
    if isinstance(results, torch.Tensor):
        results = results.to(dtype)
    else:  # multilabel_margin_loss_forward: the second has the target's places, in its own type
        results = tuple(result.to(dtype) for result in results)
    return wrap_result(results, gpu, func.name().removeprefix("aten::"))


HANDLERS: dict[str, Handler] = {
    f"aten::{name}{direction}": in_float32
    for name in (
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "avg_pool3d",
        "multi_margin_loss",
        "multilabel_margin_loss",
    )
    for direction in (("_forward" if name.startswith("multilabel") else ""), "_backward")
}
