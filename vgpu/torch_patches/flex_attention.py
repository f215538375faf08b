"""``flex_attention`` on a virtual GPU, computed by PyTorch's own eager implementation.

PyTorch has a kernel for CUDA, and an eager implementation with plain operators that stores the full
score matrix (``math_attention`` in torch/_higher_order_ops/flex_attention.py). Autograd goes
through the latter, so tensors that ``score_mod`` uses get gradients, too. As in the kernel, the
backward pass recomputes the scores, and only the inputs and outputs are saved for it. One
difference remains: while the eager implementation runs, all scores count as allocated, whereas the
kernel never stores them all.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from vgpu.memory import gpus
from vgpu.tensor import autocast as casting
from vgpu.tensor.refusals import is_virtual_device
from vgpu.time.host_threads import in_compiled_call
from vgpu.torch_patches.undo import Changes

_MODULE = "torch.nn.attention.flex_attention"


def install(changes: Changes) -> None:
    changes.when_imported(_MODULE, _replace)


def _replace(module: ModuleType, changes: Changes) -> None:
    changes.wrap(module, "_validate_device", _on_virtual_too)
    changes.wrap(module, "_warn_once", _but_in_compiled_calls)
    # Dynamo doesn't call this method: it handles the operator itself.
    changes.wrap(type(module.flex_attention_hop), "__call__", _by_formula)


def _on_virtual_too(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap the device-type check, whose list doesn't include virtual GPUs."""

    @functools.wraps(plain)
    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not is_virtual_device(query.device):
            plain(query, key, value)

    return _validate_device


def _but_in_compiled_calls(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap the warning about calls without ``torch.compile`` to skip it in compiled calls."""

    @functools.wraps(plain)
    def _warn_once(warning_id: str, *args: Any, **kwargs: Any) -> None:
        if warning_id != "flex_attention_performance" or not in_compiled_call():
            plain(warning_id, *args, **kwargs)

    return _warn_once


class _WithGradientLaidOutAlike(torch.autograd.Function):
    """Identity function that lays out its gradient like the tensor, as the kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.strides = x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.flex_attention import _permute_strides

        if _order(gradient.stride()) == _order(ctx.strides):
            return gradient
        return _permute_strides(gradient, ctx.strides)


def _order(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=strides.__getitem__)


def _by_formula(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the operator behind ``flex_attention``, which returns output, logsumexp and maxima."""
    from torch._higher_order_ops.flex_attention import _permute_strides, math_attention

    @functools.wraps(plain)
    def __call__(
        self: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not is_virtual_device(query.device):
            return plain(self, query, key, value, *args, **kwargs)
        query, key, value = (
            _WithGradientLaidOutAlike.apply(casting.cast_down(part)) for part in (query, key, value)
        )
        with torch.autocast(gpus.DEVICE_TYPE, enabled=False):
            output, logsumexp, maxima = checkpoint(
                math_attention, query, key, value, *args, use_reentrant=False, **kwargs
            )
        return _permute_strides(output, query.stride()), logsumexp, maxima

    return __call__
