"""Autocast for virtual GPUs: which operators run in which type, as for CUDA.

The lists are those of ``aten/src/ATen/autocast_mode.h``. Left out: torch's cache of cast weights,
which saves time and changes no value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from helpers.vgpu.dispatch.operators import Operator, overloads

_KEY = "AutocastPrivateUse1"

LOWER_PRECISION = [
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
]

FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "nuclear_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "norm",
    "prod",
    "softmax",
    "log_softmax",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "sum",
]

PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]


def register(library: torch.library.Library) -> None:
    """Add the kernels to ``library``, an implementation library for ``aten``."""
    for names, choose in (
        (LOWER_PRECISION, _autocast_dtype),
        (FLOAT32, lambda values: torch.float32),
        (PROMOTE, _widest_dtype),
    ):
        for func in _writing_nothing(names):
            library.impl(func, _casting(func, choose), _KEY)
    library.impl(torch.ops.aten.binary_cross_entropy.default, _refuse, _KEY)


def _writing_nothing(names: list[str]) -> list[Operator]:
    """Each overload of each operator but those that write to ``out=``."""
    return [
        func
        for name in names
        for func in overloads(getattr(torch.ops.aten, name))
        if not any(argument.is_out for argument in func._schema.arguments)
    ]


def _casting(
    func: Operator, choose: Callable[[Sequence[object]], torch.dtype]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            values = [*args, *kwargs.values()]
            if not any(isinstance(value, torch.dtype) for value in values):
                dtype = choose(values)
                args = tuple(_cast(value, dtype) for value in args)
                kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return func(*args, **kwargs)

    return kernel


_KEYSET = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def _autocast_dtype(values: Sequence[object]) -> torch.dtype:
    return torch.get_autocast_dtype("vgpu")


def _widest_dtype(values: Sequence[object]) -> torch.dtype:
    """float32 where any operand has it, else the autocast type."""
    if any(isinstance(v, torch.Tensor) and v.dtype == torch.float32 for v in values):
        return torch.float32
    return torch.get_autocast_dtype("vgpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a virtual GPU, but for float64, in ``dtype``; anything else as it is."""
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if eligible and value.device.type == "vgpu" else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _refuse(*args: object, **kwargs: object) -> None:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss instead."
    )
