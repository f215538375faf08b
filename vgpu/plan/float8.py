"""Linear layers with float8 matmuls, as in the tensorwise recipe of torchao and torchtitan.

Each of a layer's three matmuls takes float8 operands and returns bfloat16. The output is computed
from the input and the weight (both e4m3). The gradient of each is computed from the output's
gradient (e5m2) and the other operand. bfloat16 tensors are scaled by their largest absolute value
and cast right before the matmul. The input is saved for the backward pass in float8, as in
compiled code: torch.compile saves the smallest form that it finds. A matmul needs its right
operand in column-major order, which takes a transposed copy for both gradients.

With tensor parallelism, each rank casts its part of a sequence, and the gathered tensors are
float8: the inputs of column-wise layers, and the output gradients of row-wise ones. The largest
absolute value of a tensor that is split across ranks is reduced across them.

Not modeled: FSDP2's all-gather in float8. Here, it gathers bfloat16, and each rank casts that.

Sources: pytorch/ao, torchao/float8/float8_linear.py (``tensorwise``) and
float8_tensor_parallel.py; and torchtitan, which converts every layer except the output.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

INPUTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_SIDE = 16
"""A layer is converted if both sizes are multiples of this, as ``torch._scaled_mm`` requires."""

# float8 values, and the scale by which they were multiplied
_Cast = tuple[torch.Tensor, torch.Tensor]


class Float8Linear(nn.Linear):
    """``nn.Linear`` without bias, with matmuls in float8: (..., inputs) to (..., outputs)."""

    def __init__(self, weight: torch.Tensor, casts: "LastCast") -> None:
        """``casts`` is shared by all layers of a model."""
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self._casts = casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saved = _Saved.apply(x, self.weight, self._casts)
        return _Product.apply(saved, self._casts.of(x, INPUTS), self.weight)


def use_float8(module: nn.Module) -> "LastCast":
    """Convert a module's linear layers in place; return the cast that they share."""
    casts = LastCast()
    for parent in list(module.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear and not any(side % _SIDE for side in layer.weight.shape):
                setattr(parent, name, Float8Linear(layer.weight, casts))
    return casts


class LastCast:
    """The float8 version of the tensor that was cast last.

    If consecutive layers get the same tensor, it's cast only once, as in compiled code.
    """

    def __init__(self) -> None:
        self._of: Any = lambda: None
        self._cast: _Cast | None = None

    def of(self, x: torch.Tensor, dtype: torch.dtype) -> _Cast:
        if self._cast is None or self._of() is not x:
            self.put(x, _cast(x.detach(), dtype))
        assert self._cast is not None
        return self._cast

    def put(self, x: torch.Tensor, cast: _Cast) -> None:
        self._of, self._cast = weakref.ref(x), cast


class _Product(torch.autograd.Function):
    """A matmul of (..., inputs) by (outputs, inputs) to (..., outputs).

    ``_Saved`` has its backward and comes first, so that recomputing a block can stop before its
    last matmul: backward doesn't need its output. torch.compile leaves that matmul out, too.
    """

    @staticmethod
    def forward(ctx, saved, x, weight):
        values, scale = x
        output = _multiply((values.flatten(0, -2), scale), _transposed(_cast(weight, INPUTS)))
        return output.unflatten(0, values.shape[:-1])

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


class _Saved(torch.autograd.Function):
    """Save what a matmul's backward needs; return a placeholder for its output, without values."""

    @staticmethod
    def forward(ctx, x, weight, casts):
        values, scale = casts.of(x, INPUTS)
        ctx.save_for_backward(values, scale, weight)
        ctx.casts = casts
        return x.new_empty(()).expand(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, gradient):
        # This must come before recomputation casts other tensors.
        sent, sent_scale = ctx.casts.of(gradient, GRADIENTS)
        values, scale, weight = ctx.saved_tensors
        rows = sent.flatten(0, -2), sent_scale
        of_input = _multiply(rows, _by_columns(_cast(weight, INPUTS)))
        of_weight = _multiply(
            _by_rows(_transposed(rows)), _by_columns((values.flatten(0, -2), scale))
        )
        return of_input.unflatten(0, sent.shape[:-1]), of_weight, None


def _cast(x: torch.Tensor, dtype: torch.dtype) -> _Cast:
    scale = torch.finfo(dtype).max / x.abs().amax().float()
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


# Tensor parallelism: gathering float8


def gather_input(module: nn.Module, casts: LastCast) -> None:
    """Gather a module's first argument, (B, S, width), which is sharded along S."""

    def gathered(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        values, scale = _gathered(_cast(arguments[0].detach(), INPUTS))
        x = _Gathered.apply(arguments[0], scale, values.shape)
        casts.put(x, (values, scale))
        return x, *arguments[1:]

    module.register_forward_pre_hook(gathered)


def scatter_output(module: nn.Module, mesh: DeviceMesh, casts: LastCast) -> None:
    """Reduce-scatter a linear layer's output along S; gather its gradient in backward."""
    module.register_forward_hook(lambda module, _, output: _Scattered.apply(output, mesh, casts))


class _Gathered(torch.autograd.Function):
    """A placeholder for a gathered tensor, without its values: matmuls use its float8 version."""

    @staticmethod
    def forward(ctx, x, scale, size):
        return scale.to(x.dtype).expand(size)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.redistribute(placements=[Shard(1)]), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, mesh, casts):
        ctx.mesh, ctx.casts = mesh, casts
        return output.redistribute(placements=[Shard(1)]).to_local()

    @staticmethod
    def backward(ctx, gradient):
        part = DTensor.from_local(gradient, ctx.mesh, [Shard(1)], run_check=False)
        values, scale = _gathered(_cast(part, GRADIENTS))
        whole = scale.to(gradient.dtype).expand(values.shape)
        ctx.casts.put(whole, (values, scale))
        return whole, None, None


def _gathered(cast: _Cast) -> _Cast:
    values, scale = cast
    assert isinstance(values, DTensor)
    return values.redistribute(placements=[Replicate()]), scale
