"""Linear layers that multiply in float8, as torchao's and torchtitan's recipe of one scale a tensor has it.

Each of the three products of a layer takes float8 factors and gives bfloat16: the output from input and
weight (e4m3), the input's gradient and the weight's gradient from the output's gradient (e5m2). What is
bfloat16 is scaled by its largest absolute value and cast, just before its product; backward casts again
what forward was given, so that no more is kept than without float8. A product wants its right factor
by columns, which takes a transposed copy for both gradients. The largest value of a tensor that ranks
share is reduced among them.

Left out: parameters that FSDP2 gathers as float8 and tensor parallelism's gathers of it. Here both gather
bfloat16, and each rank casts what it has gathered.

Source: pytorch/ao, torchao/float8/float8_linear.py (``tensorwise``), and torchtitan, which converts all
layers but the output.
"""

import weakref
from typing import Any

import torch
from torch import nn

INPUTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_SIDE = 16
"""A layer is converted if both of its sizes are multiples of it: ``torch._scaled_mm`` takes no others."""

_Cast = tuple[torch.Tensor, torch.Tensor]  # float8 values, and what they were multiplied by


class Float8Linear(nn.Linear):
    """``nn.Linear`` without bias, with products in float8. (..., inputs) in, (..., outputs) out."""

    def __init__(self, weight: nn.Parameter, casts: "_LastCast") -> None:
        """casts: shared by the layers of a model."""
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.weight = weight
        self._casts = casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = _Product.apply(x.flatten(0, -2), *self._casts.of(x), self.weight)
        return flat.unflatten(0, x.shape[:-1])


def use_float8(module: nn.Module) -> None:
    """Convert the linear layers in a module, in place."""
    casts = _LastCast()
    for parent in list(module.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear and not any(side % _SIDE for side in layer.weight.shape):
                setattr(parent, name, Float8Linear(layer.weight, casts))


class _LastCast:
    """A tensor that several layers are given one after another is cast once, as compiled code has it."""

    def __init__(self) -> None:
        self._of: Any = lambda: None
        self._cast: _Cast | None = None

    def of(self, x: torch.Tensor) -> _Cast:
        if self._cast is None or self._of() is not x:
            self._of, self._cast = weakref.ref(x), _cast(x.detach().flatten(0, -2), INPUTS)
        return self._cast


class _Product(torch.autograd.Function):
    """(T, inputs) by (outputs, inputs) to (T, outputs)."""

    @staticmethod
    def forward(ctx, x, values, scale, weight):
        ctx.save_for_backward(x, scale, weight)
        return _multiply((values, scale), _transposed(_cast(weight, INPUTS)))

    @staticmethod
    def backward(ctx, gradient):
        x, scale, weight = ctx.saved_tensors
        sent = _cast(gradient, GRADIENTS)
        of_input = _multiply(sent, _by_columns(_cast(weight, INPUTS)))
        rows, columns = _by_rows(_transposed(sent)), _by_columns(_scaled(x, scale, INPUTS))
        return of_input, None, None, _multiply(rows, columns)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> _Cast:
    largest = x.abs().amax().float()
    return _scaled(x, torch.finfo(dtype).max / largest, dtype)


def _scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> _Cast:
    return (x * scale).to(dtype), scale


def _multiply(left: _Cast, right: _Cast) -> torch.Tensor:
    (values, scale), (others, other_scale) = left, right
    factors = scale.reciprocal(), other_scale.reciprocal()
    return torch._scaled_mm(values, others, *factors, out_dtype=torch.bfloat16)


def _transposed(cast: _Cast) -> _Cast:
    return cast[0].t(), cast[1]


def _by_rows(cast: _Cast) -> _Cast:
    return cast[0].contiguous(), cast[1]


def _by_columns(cast: _Cast) -> _Cast:
    return cast[0].t().contiguous().t(), cast[1]
