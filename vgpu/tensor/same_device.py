"""Check that operands are on the same device, with CUDA's error messages.

Only calls that mix GPUs, or a GPU and the CPU, are checked. On CUDA, three kinds of code do this:
TensorIterator for elementwise operators, generated code for most others, and the indexing code
itself. Operators marked ``device_check: NoCheck`` in native_functions.yaml do their own checks, or
accept operands on other devices; they're listed below.
"""

from collections.abc import Callable, Iterator

import torch

from vgpu.tensor.operator_info import INDEXING, OperatorInfo
from vgpu.tensor.operators import Args, Kwargs, Operator

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def check(info: OperatorInfo, args: Args, kwargs: Kwargs) -> None:
    """Raise CUDA's RuntimeError if the operands of a call are on devices that can't be mixed."""
    _check_hosts(info.func, args, kwargs)
    check_of(info.func)(info.func, args, kwargs)


def check_of(func: Operator) -> Callable[[Operator, Args, Kwargs], None]:
    """Return the function below that checks an operator as CUDA does."""
    if func._schema.name in INDEXING:
        return _check_indexing
    if _is_elementwise(func):
        return _check_elementwise
    if func._schema.name == "aten::convolution":
        return _check_convolution
    if func._schema.name in _WITH_SCALAR and func._schema.overload_name == "Tensor":
        return _check_scalar
    return check_generated


def _is_elementwise(func: Operator) -> bool:
    """Whether TensorIterator runs the operator; some in-place variants lack torch's tag."""
    if torch.Tag.pointwise in func.tags or func._schema.name in _ELEMENTWISE:
        return True
    name, overload = func._schema.name.partition("::")[2], func._schema.overload_name
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
    sibling = getattr(plain, overload or "default", None)
    return sibling is not None and torch.Tag.pointwise in sibling.tags


# Operators that TensorIterator runs, or composites of such operators, that lack torch's tag for it.
_ELEMENTWISE = {
    f"aten::{name}"
    for name in (
        "__ilshift__",
        "__irshift__",
        "binary_cross_entropy_with_logits",
        "dist",
        "fill",
        "fill_",
        "floor_divide",
        "floor_divide_",
        "isin",
        "lerp",
        "lerp_",
        "masked_fill",
        "masked_fill_",
        "rsub",
        "where",
    )
}
# These operators' kernels accept a scalar on the CPU
# (ATen/native/cuda/ForeachBinaryOpScalarTensor.cu).
_WITH_SCALAR = {f"aten::_foreach_{name}" for name in ("div", "div_", "mul", "mul_")}


def _check_hosts(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Reject mixing a cluster's GPUs with those outside its block, which have the same names."""
    gpus: dict[torch.device, object] = {}
    for name, tensor in _named_tensors(func, args, kwargs):
        gpu = getattr(tensor, "_gpu", None)
        if gpu is not None and gpus.setdefault(tensor.device, gpu) is not gpu:
            raise RuntimeError(
                f"{func._schema.name} got tensors from two hosts: {name}, of size "
                f"{list(tensor.size())}, is on {tensor.device}, and so is another, but one of the "
                "two was created before a vgpu.cluster block, or in one that has ended. Create both in "
                "the block, or move one into it through the host: x.cpu().to(...)"
            )


def _check_elementwise(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Accept CPU scalars among tensors on any device, but not as outputs.

    The common device is that of the first operand that isn't on the CPU.
    """
    written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    named = list(_named_tensors(func, args, kwargs))
    common = next(tensor.device for _, tensor in named if tensor.device.type != "cpu")
    for name, tensor in named:
        if tensor.device != common and (name in written or not _is_cpu_scalar(tensor)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, "
                f"but found at least two devices, {common} and {tensor.device}!"
            )


def check_generated(func: Operator, args: Args, kwargs: Kwargs) -> None:
    common = None
    for name, tensor in _named_tensors(func, args, kwargs):
        if name in _MAY_BE_ON_CPU and tensor.device.type == "cpu":
            continue
        if common and common.type != "cpu" and name == _ANYWHERE.get(func._schema.name):
            continue
        common = common or tensor.device
        if tensor.device != common:
            name, method = _names_in_cuda(func, name)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {name} is on "
                f"{tensor.device}, different from other tensors on {common} "
                f"(when checking argument in method wrapper_VGPU_{method})"
            )


def _check_convolution(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Compare tensor types first, as convolution does; they don't distinguish between GPUs."""
    tensor = args[0]
    for name, other in _named_tensors(func, args, kwargs):
        if other.device.type != tensor.device.type:
            mkldnn = " or input should be a MKLDNN tensor and weight is a dense tensor"
            raise RuntimeError(
                f"Input type ({tensor.type()}) and {name} type ({other.type()}) should be the same"
                f"{mkldnn if name == 'weight' and tensor.device.type == 'cpu' else ''}"
            )
    check_generated(func, args, kwargs)


def _check_indexing(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Accept indices on the CPU, and also a value if it's a scalar."""
    tensor = args[0]
    for name, other in _named_tensors(func, args[1:], kwargs, skip=1):
        if other.device == tensor.device or _is_cpu_scalar(other):
            continue
        if name == "indices" and other.device.type != "cpu":
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({tensor.device})"
            )
        if name != "indices":
            raise RuntimeError(
                "Expected all tensors to be on the same device, "
                f"but found at least two devices, {tensor.device} and {other.device}!"
            )


def _check_scalar(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Check the scalar for a list of tensors on one GPU; other lists run tensor by tensor."""
    tensor, scalar = args[0][0], args[1]
    if not _is_cpu_scalar(scalar):
        verb = "is expected" if func._schema.name.endswith("_") else "expected"
        raise RuntimeError(
            f"scalar tensor {verb} to be on {tensor.device} but is on {scalar.device}"
        )


# Arguments that the host reads: lengths of packed sequences, the learning rate of fused optimizers, and the
# factors of _foreach_addcmul.
_MAY_BE_ON_CPU = {"lengths", "batch_sizes", "lr", "scalars"}

# The argument that the kernel copies to its GPU, or reads on the host, whatever device it's on.
_ANYWHERE = {
    "aten::as_strided_scatter": "src",
    "aten::bernoulli_": "p",
    "aten::diagonal_scatter": "src",
    "aten::index_fill": "value",
    "aten::index_fill_": "value",
    "aten::select_scatter": "src",
    "aten::slice_scatter": "src",
}

# For composite operators, the argument and the underlying operator that CUDA's check names.
_BELOW = {
    "aten::embedding": ({"indices": "index", "weight": "self"}, "_index_select"),
    "aten::stack": ({}, "cat"),
    "aten::convolution": ({}, "_cudnn_convolution"),
}


def _names_in_cuda(func: Operator, argument: str) -> tuple[str, str]:
    """Return the argument's and operator's names in the message from the generated check.

    torchgen writes ``overload_name`` for plain kernels and ``name_overload`` for structured ones.
    """
    if func._schema.name in _BELOW:
        arguments, method = _BELOW[func._schema.name]
        return arguments.get(argument, argument), method
    name, overload = func._schema.name.partition("::")[2], func._schema.overload_name
    if any(a.is_out for a in func._schema.arguments):
        name += "_out"
    if _has_kernel(func.name(), "CompositeExplicitAutogradNonFunctional"):  # a structured kernel
        return argument, f"{name}_{overload}" if overload else name
    return argument, f"{overload}_{name}"


def _is_cpu_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _named_tensors(
    func: Operator, args: Args, kwargs: Kwargs, skip: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in ``args``, which omits the first ``skip``, with its parameter's name."""
    for position, argument in enumerate(func._schema.arguments[skip:]):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield argument.name, item
