"""RMSNorm as CUDA has it: one kernel forward and one backward, which keep one number a row.

Elsewhere torch makes it of six operations. The values here are theirs, the bytes and the kernels
CUDA's. Double backward comes from torch's own formula.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from vgpu.tensor.operations import compute, dispatch
from vgpu.tensor.operators import Handler
from vgpu.torch_patches.undo import Changes

_FORWARD = torch.ops.aten._fused_rms_norm.default


def register(kernels: torch.library.Library) -> None:
    """Say that our devices have the kernel: autograd then calls it, and not its parts."""
    kernels.impl(_FORWARD, lambda *args: dispatch(_FORWARD, args, {}), "Lazy")


def install(changes: Changes) -> None:
    """Give the CPU and shapes the backward pass for as long as there are virtual GPUs."""
    kernels = changes.library("aten")
    for key in ("CPU", "Meta"):
        kernels.impl("_fused_rms_norm_backward", _backward, key)


def _backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Any, Any]:
    """The gradients of the input and of the weight, each in its own type; computed in float32."""
    wide = torch.float64 if input.dtype is torch.float64 else torch.float32
    rows = tuple(range(input.dim() - len(normalized_shape)))
    within = tuple(range(len(rows), input.dim()))
    rstd = rstd.to(wide).reshape(*input.shape[: len(rows)], *[1] * len(within))
    grad, normal = grad_out.to(wide), input.to(wide) * rstd
    of_input = of_weight = None
    if output_mask[0]:
        inner = grad if weight is None else grad * weight.to(wide)
        along = (inner * normal).mean(within, keepdim=True) if math.prod(normalized_shape) else 0
        of_input = ((inner - normal * along) * rstd).to(input.dtype).contiguous()
    if output_mask[1] and weight is not None:
        of_weight = (grad * normal).sum(rows) if rows else grad * normal
        of_weight = of_weight.to(weight.dtype)
    return of_input, of_weight


# Without an entry, the forward pass would be taken for a composite operator, and recorded in parts.
HANDLERS: dict[str, Handler] = {"aten::_fused_rms_norm": compute}
