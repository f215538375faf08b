"""Softmax of float16 with a float32 result: one kernel on a GPU, which makes no copy in float32.

``softmax(x, dim, dtype=torch.float32)`` takes it there, and so does autocast, for float16 and no
other type (``aten/src/ATen/native/SoftMax.cpp``). In C++ that is asked of CUDA tensors only.
"""

from typing import Any

import torch

from vgpu.tensor.operations import compute, unwrap
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator, named_arguments
from vgpu.tensor.rules import Condition, always, decompose
from vgpu.tensor.same_device import check_for
from vgpu.tensor.tensor import wrap


def softmax(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """``softmax.int`` or ``log_softmax.int`` as the operators that it consists of."""
    named = named_arguments(func, args, kwargs)
    source, dtype = named["self"], named.get("dtype")
    if source.dtype is torch.float16 and dtype is torch.float32:
        return _KERNELS[func.name()](source, named["dim"], True)
    return decompose(func, args, kwargs)


def forward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    if not named["half_to_float"] or "out" in named:
        return compute(func, args, kwargs)
    source = named["self"]
    if source.dtype is not torch.float16:
        raise RuntimeError("conversion is supported for Half type only")
    values = func(source._inner.float(), named["dim"], False)
    return wrap(values, source._gpu, func.name().removeprefix("aten::"))


def backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    named = named_arguments(func, args, kwargs)
    grad, dtype = named["grad_output"], named["input_dtype"]
    if grad.dtype is dtype or dtype is not torch.float16 or len(named) > 4:
        return compute(func, args, kwargs)
    inner, gpu, mixed = unwrap((grad, named["output"]), None, False)
    assert gpu is not None, "no virtual tensor among the arguments"
    if mixed:
        check_for(func)(func, args, kwargs)
    values = func(*inner, named["dim"], grad.dtype)
    return wrap(values.to(dtype), gpu, func.name().removeprefix("aten::"))


_KERNELS = {
    "aten::softmax.int": torch.ops.aten._softmax.default,
    "aten::log_softmax.int": torch.ops.aten._log_softmax.default,
}
PARTS: dict[str, tuple[Condition, Handler]] = dict.fromkeys(_KERNELS, (always, softmax))
HANDLERS: dict[str, Handler] = {
    "aten::_softmax": forward,
    "aten::_log_softmax": forward,
    "aten::_softmax_backward_data": backward,
    "aten::_log_softmax_backward_data": backward,
}
