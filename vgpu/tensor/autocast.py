"""Autocast for virtual GPUs: operators run in the same dtypes as on CUDA.

The policies and the cache of cast weights follow ``aten/src/ATen/autocast_mode.cpp``. The lists at
the end of this file assign a policy to each operator.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.tensor.operators import Operator, operator_of_aten
from vgpu.torch_patches.undo import Changes

_KEY = "AutocastPrivateUse1"
_KEYSET = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

Kernel = Callable[..., Any]


def install(changes: Changes) -> None:
    """Wrap the function that torch calls at the end of the outermost autocast block."""
    changes.wrap(torch, "clear_autocast_cache", _clearing)


def register(library: torch.library.Library) -> None:
    """Add the kernels to ``library``, an implementation library for ``aten``."""
    kernels = {
        **dict.fromkeys(LOWER_PRECISION_FP, _in_lower_precision),
        **dict.fromkeys(FP32, _in_float32),
        **dict.fromkeys(FP32_SET_OPT_DTYPE, _giving_float32),
        **dict.fromkeys(PROMOTE, _in_widest),
    }
    for name, policy in kernels.items():
        func = operator_of_aten(name)
        library.impl(func, policy(func), _KEY)
    library.impl(torch.ops.aten.binary_cross_entropy.default, _refuse, _KEY)


# The policies


def _casting(func: Operator, choose: Callable[[list[Any]], torch.dtype]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            dtype = choose([*args, *kwargs.values()])
            kwargs = {name: cast(value, dtype) for name, value in kwargs.items()}
            return func(*(cast(value, dtype) for value in args), **kwargs)

    return kernel


def _in_lower_precision(func: Operator) -> Kernel:
    return _casting(func, lambda values: _lower_precision())


def _in_float32(func: Operator) -> Kernel:
    return _casting(func, lambda values: torch.float32)


def _in_widest(func: Operator) -> Kernel:
    return _casting(func, _widest)


def _giving_float32(func: Operator) -> Kernel:
    place = [argument.name for argument in func._schema.arguments].index("dtype")
    copies = func.name() in ("aten::cumsum", "aten::cumprod")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            given = args[place] if place < len(args) else kwargs.get("dtype")
            if given is not None or not _is_eligible(args[0]):
                return func(*args, **kwargs)
            first, *rest = args[:place]
            if copies:  # as CUDA does; its sum and norm kernels read half precision directly
                first = first.to(torch.float32)
            return func(first, *rest, *args[place + 1 :], **kwargs | {"dtype": torch.float32})

    return kernel


def _lower_precision() -> torch.dtype:
    return torch.get_autocast_dtype(gpus.DEVICE_TYPE)


def _widest(values: list[Any]) -> torch.dtype:
    """Return float32 if any operand has that dtype, otherwise the autocast dtype."""
    widest = _lower_precision()
    tensors = [one for value in values for one in (value if isinstance(value, list) else [value])]
    for one in tensors:
        if not _is_eligible(one):
            continue
        if torch.float32 in (widest, one.dtype):
            widest = torch.float32
        elif one.dtype is not widest:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return widest


def _refuse(*args: object, **kwargs: object) -> None:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss instead."
    )


# Casts, and the cache of cast weights


def cast_down(value: Any) -> Any:
    """Return ``value``, cast to the autocast dtype if autocast is enabled."""
    if not torch.is_autocast_enabled(gpus.DEVICE_TYPE):
        return value
    return cast(value, _lower_precision())


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors on virtual GPUs to ``dtype``, except float64 ones.

    Anything else is returned unchanged.
    """
    if isinstance(value, list | tuple):
        return type(value)(cast(item, dtype) for item in value)
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    return _cached(value, dtype) if _is_weight(value, dtype) else value.to(dtype)


def recurrent(plain: Kernel) -> Kernel:
    """Wrap ``torch.lstm`` and the like, which cuDNN runs in float16 whatever the autocast dtype.

    ATen/cudnn/AutocastRNN.cpp hard-codes float16 and doesn't cache cast weights.
    """

    @functools.wraps(plain)
    def cast_first(*args: Any, **kwargs: Any) -> Any:
        on_gpu = isinstance(args[0], torch.Tensor) and args[0].device.type == gpus.DEVICE_TYPE
        by_cudnn = torch.backends.cudnn.enabled and on_gpu
        if not by_cudnn or not torch.is_autocast_enabled(gpus.DEVICE_TYPE):
            return plain(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_KEYSET):
            kwargs = {name: _in_float16(value) for name, value in kwargs.items()}
            return plain(*(_in_float16(value) for value in args), **kwargs)

    return cast_first


def _in_float16(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_in_float16(item) for item in value)
    return value.to(torch.float16) if _is_eligible(value) else value


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == gpus.DEVICE_TYPE
    )


def _is_weight(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype is _lower_precision()
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


# Keyed by the weight's id, as in C++; all threads and dtypes share this cache.
_casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}


def _cached(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    of, copy = _casts.get(id(weight), (None, None))
    if copy is None or of is None or of() is not weight:
        with torch.enable_grad():  # a later use outside no_grad may need the cast's graph
            copy = weight.to(dtype)
        _casts[id(weight)] = weakref.ref(weight), copy
    return copy


def _clearing(plain: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        _casts.clear()
        plain()

    return clear_autocast_cache


# Each operator's policy on CUDA, by overload: the ``AT_FORALL_...`` lists in
# ``ATen/autocast_mode.h``. ``tests/vgpu/tensor/test_autocast.py`` compares these lists with the
# header of the installed torch. norm.Scalar and norm.ScalarOpt_dim are left out: torch.norm no
# longer calls them on a GPU.

LOWER_PRECISION_FP = [
    *("_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution"),
    *("prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot"),
    *("linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell"),
    *("rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
]
"""All inputs are cast to the autocast dtype."""

FP32 = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist"),
    *("renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d"),
    *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bicubic2d_aa",),
]
"""All inputs are cast to float32."""

FP32_SET_OPT_DTYPE = [
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum"),
    *("sum.dim_IntList",),
]
"""The argument ``dtype`` defaults to float32; autocast itself doesn't cast the inputs."""

PROMOTE = [
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler"),
    *("index_put", "tensordot", "scatter_add"),
]
"""All inputs are cast to the widest of their dtypes."""
