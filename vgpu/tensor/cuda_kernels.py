"""Operators whose kernel on CUDA takes other types than the CPU's, or hands out other results.

Each is computed by the CPU's kernel, and given the types and the buffers of CUDA's.
"""

from typing import Any

import torch

from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.composite import decompose
from vgpu.tensor.operator_info import handler, in_parts
from vgpu.tensor.operators import Args, Kwargs, Operator, named_arguments
from vgpu.tensor.tensor import named_values, run_unrecorded, wrap, wrap_result

HALF = (torch.float16, torch.bfloat16)


# Computed in float32 and rounded, where the CPU has no kernel for float16 and bfloat16. The list is
# torch's own, of where ``dtypesIfCUDA`` has more than ``dtypes`` in
# torch/testing/_internal/common_methods_invocations.py. In it but not here: Fourier transforms, and
# ``rrelu`` of float16, which stay errors of the CPU's.

IN_FLOAT32 = (
    *("_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward"),
    *("_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward"),
    *("avg_pool3d", "avg_pool3d_backward"),
    *("multi_margin_loss", "multi_margin_loss_backward"),
    *("multilabel_margin_loss_forward", "multilabel_margin_loss_backward"),
)


def widened(func: Operator, args: Args, kwargs: Kwargs) -> tuple[dict[str, Any], VirtualGPU]:
    """The arguments by name, CPU tensors in place of virtual ones, halves as float32; and the GPU."""
    named, gpu = named_values(func, args, kwargs)
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.dtype in HALF:
            named[name] = value.float()
    return named, gpu


@handler(*(f"aten::{name}" for name in IN_FLOAT32))
def in_float32(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    dtype = args[0].dtype
    if kwargs or dtype not in HALF:  # out=
        return run_unrecorded(func, args, kwargs)
    named, gpu = widened(func, args, kwargs)
    results = func(**named)
    if isinstance(results, torch.Tensor):
        results = results.to(dtype)
    else:  # multilabel_margin_loss_forward: the second has the target's places, in its own type
        results = tuple(result.to(dtype) for result in results)
    return wrap_result(results, gpu, func.name().removeprefix("aten::"))


# Softmax of float16 with a float32 result: one kernel on a GPU, which makes no copy in float32.
# ``softmax(x, dim, dtype=torch.float32)`` takes it there, and so does autocast, for float16 and no
# other type (``aten/src/ATen/native/SoftMax.cpp``). In C++ that is asked of CUDA tensors only.

_SOFTMAX = {
    "aten::softmax.int": torch.ops.aten._softmax.default,
    "aten::log_softmax.int": torch.ops.aten._log_softmax.default,
}


@in_parts(*_SOFTMAX)
def softmax(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """``softmax.int`` or ``log_softmax.int`` as the operators that it consists of."""
    named = named_arguments(func, args, kwargs)
    source, dtype = named["self"], named.get("dtype")
    if source.dtype is torch.float16 and dtype is torch.float32:
        return _SOFTMAX[func.name()](source, named["dim"], True)
    return decompose(func, args, kwargs)


def register(kernels: torch.library.Library) -> None:
    """Let ``softmax`` see its operators before autograd takes them apart."""
    for func in (torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int):
        kernels.impl(func, _softmax_of(func), "AutogradLazy")


def _softmax_of(func: Operator) -> Any:
    return lambda *args, **kwargs: softmax(func, args, kwargs)


@handler("aten::_softmax", "aten::_log_softmax")
def softmax_forward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    if not named["half_to_float"] or "out" in named:
        return run_unrecorded(func, args, kwargs)
    source = named["self"]
    if source.dtype is not torch.float16:
        raise RuntimeError("conversion is supported for Half type only")
    values = func(source._inner.float(), named["dim"], False)
    return wrap(values, source._gpu, func.name().removeprefix("aten::"))


@handler("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    grad, dtype = named["grad_output"], named["input_dtype"]
    if grad.dtype is dtype or dtype is not torch.float16 or len(named) > 4:
        return run_unrecorded(func, args, kwargs)
    values, gpu = named_values(func, args, kwargs)
    gradient = func(values["grad_output"], values["output"], named["dim"], grad.dtype)
    return wrap(gradient.to(dtype), gpu, func.name().removeprefix("aten::"))


# ``F.logsigmoid``: backward computes once more what the CPU's kernel keeps.


@handler("aten::log_sigmoid_forward")
def log_sigmoid(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    if kwargs:  # out=
        return run_unrecorded(func, args, kwargs)
    (source,) = args
    output, buffer = func(source._inner)
    return wrap_result((output, buffer.new_empty(0)), source._gpu, "log_sigmoid_forward")


@handler("aten::log_sigmoid_backward")
def log_sigmoid_backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = named_values(func, args, kwargs)
    _, buffer = torch.ops.aten.log_sigmoid_forward(named["self"])
    if kwargs:  # out=
        buffer = wrap(buffer, gpu, "log_sigmoid_backward")
        return run_unrecorded(func, (*args[:2], buffer), kwargs)
    return wrap(func(named["grad_output"], named["self"], buffer), gpu, "log_sigmoid_backward")


# ``F.embedding_bag`` keeps each index's bag, and places only for maxima. The CPU's has a way for sums
# without the bags, and room for places that nobody reads (ATen/native/EmbeddingBag.cpp; for CUDA's
# see meta_embedding_bag in torch/_meta_registrations.py).

_MAXIMA = 2  # of the modes sum, mean and max


@handler("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named, gpu = named_values(func, args, kwargs)
    output, bag_of, sizes, places = func(**named)
    indices, offsets = named["indices"], named["offsets"]
    if bag_of.numel() == 0 and indices.numel() > 0:
        ends = torch.searchsorted(offsets, torch.arange(len(indices), device="cpu"), right=True)
        bag_of = (ends - 1).to(indices.dtype)
    if named.get("mode", 0) != _MAXIMA:
        places = indices.new_empty(0)
    return wrap_result((output, bag_of, sizes, places), gpu, "_embedding_bag")
