"""Operators that are one kernel on the CPU but several on a GPU, with intermediate tensors.

On a GPU, those tensors need memory, and each kernel takes time. Operators that C++ decomposes in
the same way for every device are in operators.py; those here have a CPU kernel that does everything
internally, so none of it can be counted. The scratch memory of CUDA's sort, scan and reduction
kernels isn't counted.
"""

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from vgpu.tensor.operators import Args, Kwargs, Operator, in_parts, named_arguments
from vgpu.tensor.tensor import is_shape

aten = torch.ops.aten


# Matmuls and convolutions copy an operand whose strides cuBLAS or cuDNN doesn't support.


def copies_operand(args: Args, kwargs: Kwargs) -> bool:
    """Whether one of the last two arguments, matrices or batches of matrices, is copied.

    cuBLAS can't read a matrix if neither its rows nor its columns are contiguous, as in a sum's
    gradient, which is an expanded tensor (``prepare_matrix_for_cublas`` and
    ``prepare_batch_matrix_for_cublas`` in ATen/native/cuda/Blas.cpp).
    """
    left, right = args[-2:]
    return (not left.is_contiguous() and _needs_copy(left)) or (
        not right.is_contiguous() and _needs_copy(right)
    )


def _needs_copy(factor: torch.Tensor) -> bool:
    strides = factor.stride()
    if len(strides) < 2 or factor.layout is not torch.strided:  # the operator doesn't use cuBLAS
        return False
    down, along = strides[-2:]
    if along == 1:
        return down < factor.size(-1)
    return not (down == 1 and along >= factor.size(-2))


@in_parts("aten::mm", "aten::addmm", "aten::addmm_", when=copies_operand)
@in_parts("aten::bmm", "aten::baddbmm", "aten::baddbmm_", when=copies_operand)
def product(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    factors = [one.contiguous() if _needs_copy(one) else one for one in args[-2:]]
    return func(*args[:-2], *factors, **kwargs)


def is_reformatted(args: Args, kwargs: Kwargs) -> bool:
    """Whether an operand of a convolution isn't in the memory format in which cuDNN computes."""
    operands = _operands(args)
    if all(args[position].is_contiguous() for position in operands):
        return False
    in_format = _cudnn_format(args)
    return not all(args[p].is_contiguous(memory_format=in_format) for p in operands)


def _operands(args: Args) -> tuple[int, ...]:
    """Return the positions of the arguments that a convolution, or its backward, reads."""
    if len(args) == _FORWARD:
        return _INPUT_AND_WEIGHT
    of_input, of_weight, _ = args[-1]
    return 0, *([1] if of_weight else []), *([2] if of_input else [])


_FORWARD, _INPUT_AND_WEIGHT = 9, (0, 1)  # in backward, they follow the output's gradient


def _cudnn_format(args: Args) -> torch.memory_format:
    """Return the format that ``cudnn_conv_suggest_memory_format`` (ConvUtils.h) suggests."""
    for operand in args[:2] if len(args) == _FORWARD else args[1:3]:
        found: torch.memory_format = suggest_memory_format(operand)
        if found is not torch.contiguous_format and operand.dtype is not torch.float64:
            return found
    return torch.contiguous_format


@in_parts("aten::convolution", "aten::convolution_backward", when=is_reformatted)
def convolution(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    operands, in_format = _operands(args), _cudnn_format(args)
    return func(
        *(
            one.contiguous(memory_format=in_format) if position in operands else one
            for position, one in enumerate(args)
        ),
        **kwargs,
    )


_NONE, _MEAN = 0, 1  # at::Reduction


def is_reduced(args: Args, kwargs: Kwargs) -> bool:
    """Whether the loss is reduced to a mean or sum; ``reduction`` is the first integer argument."""
    given = [one for one in args[2:4] if type(one) is int]
    return (given[0] if given else kwargs.get("reduction", _MEAN)) != _NONE


@in_parts("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", when=is_reduced)
def loss(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Compute a loss for each element, and then the mean or sum (Loss.cpp).

    ``mse_loss`` and ``smooth_l1_loss`` allocate their result for all elements and resize it to a
    scalar, so it keeps the larger storage (``TORCH_META_FUNC(mse_loss)``).
    """
    named = named_arguments(func, args, kwargs)
    reduction = named.get("reduction", _MEAN)
    each = func(**{**named, "reduction": _NONE})
    if func is aten.huber_loss.default:
        return each.mean() if reduction == _MEAN else each.sum()
    result = torch.empty_like(each).resize_(())
    if reduction == _MEAN:
        return aten.mean.out(each, [], out=result)
    return aten.sum.IntList_out(each, [], out=result)


@in_parts("aten::binary_cross_entropy", when=is_reduced)
def binary_cross_entropy(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Overwrite the losses with their mean or sum (``binary_cross_entropy_out_cuda``, Loss.cu)."""
    named = named_arguments(func, args, kwargs)
    each = func(**{**named, "reduction": _NONE})
    reduced = each.mean() if named.get("reduction", _MEAN) == _MEAN else each.sum()
    return each.resize_as_(reduced).copy_(reduced)


@in_parts("aten::logsumexp")
def logsumexp(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Subtract the maximum before the exponential (``logsumexp_out_impl``, ReduceOps.cpp)."""
    named = named_arguments(func, args, kwargs)
    source, dims, keepdim = named["self"], named["dim"], named.get("keepdim", False)
    if not (source.is_floating_point() or source.is_complex()):
        source = source.to(torch.get_default_dtype())
    if source.numel() == 0:
        return source.exp().sum(dims, keepdim).log_()
    largest = torch.real(source).amax(dims, True)
    kept = largest if keepdim else largest.squeeze(dims or list(range(source.dim())))
    kept.masked_fill_(kept.abs() == float("inf"), 0)
    return (source - largest).exp_().sum(dims, keepdim).log_().add_(kept)


def fits_mask(args: Args, kwargs: Kwargs) -> bool:
    """Whether the arguments are valid."""
    named = named_arguments(aten.masked_select.default, args, kwargs)
    source, mask = named["self"], named["mask"]
    return mask.dtype is torch.bool and source.device == mask.device


@in_parts("aten::masked_select", when=fits_mask)
def masked_select(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Select with ``index``, as on CUDA (``masked_select_out_cuda_impl``, IndexKernel.cpp)."""
    named = named_arguments(func, args, kwargs)
    mask, source = torch.broadcast_tensors(*torch.atleast_1d(named["mask"], named["self"]))
    return aten.index.Tensor(source, [mask])


def are_unready(args: Args, kwargs: Kwargs) -> bool:
    """Whether there are masks to convert, or indices on the CPU for a tensor on a GPU.

    Masks aren't converted when a single value is filled in (``canDispatchToMaskedFill``), or for
    shapes, whose masks have no values from which to compute indices.
    """
    source, indices, *others = args
    if source.device.type == "cpu" or is_shape(source):
        return False
    given = [one for one in indices if one is not None]
    fills = len(given) == 1 and others and others[0].numel() == 1 and others[1:2] != [True]
    return any((one.dtype is torch.bool and not fills) or one.device.type == "cpu" for one in given)


@in_parts(
    *("aten::index.Tensor", "aten::index_put", "aten::index_put_"),
    *("aten::_index_put_impl_", "aten::_unsafe_index.Tensor"),
    when=are_unready,
)
def index(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Convert masks to indices, and move indices to the GPU (``expandTensors``)."""
    source, indices, *others = args
    ready: list[torch.Tensor | None] = []
    for one in indices:
        is_mask = one is not None and one.dtype is torch.bool
        if is_mask:
            _check_mask(one, source, len(ready))
        for found in one.nonzero().unbind(1) if is_mask else (one,):
            if found is not None and found.device.type == "cpu":
                found = found.to(source.device, non_blocking=is_mask)
            ready.append(found)
    return func(source, ready, *others, **kwargs)


def _check_mask(mask: torch.Tensor, source: torch.Tensor, first: int) -> None:
    for dim, (found, size) in enumerate(zip(mask.shape, source.shape[first:], strict=False)):
        if found != size:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim} does not match the "
                f"shape of the indexed tensor {list(source.shape)} at index {first + dim}"
            )
