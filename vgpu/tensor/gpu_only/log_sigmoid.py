"""``F.logsigmoid`` as on a GPU, where backward computes once more what the CPU's kernel keeps."""

from typing import Any

import torch

from vgpu.tensor.operations import compute, unwrap
from vgpu.tensor.operators import Args, Handler, Kwargs, Operator
from vgpu.tensor.same_device import check_for
from vgpu.tensor.tensor import wrap


def forward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    if kwargs:  # out=
        return compute(func, args, kwargs)
    (source,) = args
    output, buffer = func(source._inner)
    results = output, buffer.new_empty(0)
    return tuple(wrap(one, source._gpu, "log_sigmoid_forward") for one in results)


def backward(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    (grad, source), gpu, mixed = unwrap(args[:2], None, False)
    if mixed:
        check_for(func)(func, args, kwargs)
    assert gpu is not None, "no virtual tensor among the arguments"
    _, buffer = torch.ops.aten.log_sigmoid_forward(source)
    if kwargs:  # out=
        return compute(func, (*args[:2], wrap(buffer, gpu, "log_sigmoid_backward")), kwargs)
    return wrap(func(grad, source, buffer), gpu, "log_sigmoid_backward")


HANDLERS: dict[str, Handler] = {
    "aten::log_sigmoid_forward": forward,
    "aten::log_sigmoid_backward": backward,
}
