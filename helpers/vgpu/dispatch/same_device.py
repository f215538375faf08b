"""Which operands may lie on different devices, and CUDA's words for those that may not.

Only calls that mix GPUs, or a GPU and the CPU, are checked. On CUDA, three kinds of code do it: TensorIterator for
elementwise operators, generated code in front of most others, and indexing itself.
"""

from collections.abc import Callable, Iterator
from importlib import resources

import torch

from helpers.vgpu.dispatch.operators import Args, Kwargs, Operator

Check = Callable[[Operator, Args, Kwargs], None]


def check_for(func: Operator) -> Check:
    """The check for the operands of ``func``."""
    on_devices = _on_devices(func)

    def check(func: Operator, args: Args, kwargs: Kwargs) -> None:
        _check_hosts(func, args, kwargs)
        on_devices(func, args, kwargs)

    return check


def _on_devices(func: Operator) -> Check:
    if func._schema.name in _INDEXING:
        return _check_indexing
    if torch.Tag.pointwise in func.tags or func._schema.name in _ELEMENTWISE:
        return _check_elementwise
    if func._schema.name == "aten::convolution":
        return _check_convolution
    return _check_generated


_INDEXING = {
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
}
# Run by TensorIterator, but without torch's tag for it.
_ELEMENTWISE = {
    f"aten::{name}" for name in ("where", "lerp", "lerp_", "fill", "fill_", "masked_fill", "isin")
} | {"aten::masked_fill_"}


def _check_hosts(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """GPUs of a cluster and those from before its block have the same names."""
    gpus: dict[torch.device, object] = {}
    for name, tensor in _named_tensors(func, args, kwargs):
        gpu = getattr(tensor, "_gpu", None)
        if gpu is not None and gpus.setdefault(tensor.device, gpu) is not gpu:
            raise RuntimeError(
                f"{func._schema.name} got tensors of two hosts: {name}, of size "
                f"{list(tensor.size())}, is on {tensor.device}, and so is another, but one of the "
                "two was made before a vgpu.cluster block, or in one that has ended. Make both in "
                "the block, or take one there through the host: x.cpu().to(...)"
            )


def _check_elementwise(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """CPU scalars mix with anything, but a result cannot be written to one.

    The common device is that of the first operand which is not on the CPU.
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


def _check_generated(func: Operator, args: Args, kwargs: Kwargs) -> None:
    common = None
    for name, tensor in _named_tensors(func, args, kwargs):
        if name in _ALWAYS_ON_CPU and tensor.device.type == "cpu":
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
    """Convolution compares types first, which tell the CPU from a GPU but not two GPUs."""
    tensor = args[0]
    for name, other in _named_tensors(func, args, kwargs):
        if other.device.type != tensor.device.type:
            mkldnn = " or input should be a MKLDNN tensor and weight is a dense tensor"
            raise RuntimeError(
                f"Input type ({tensor.type()}) and {name} type ({other.type()}) should be the same"
                f"{mkldnn if name == 'weight' and tensor.device.type == 'cpu' else ''}"
            )
    _check_generated(func, args, kwargs)


def _check_indexing(func: Operator, args: Args, kwargs: Kwargs) -> None:
    """Indices may lie on the CPU; a value may if it is a scalar."""
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


# Lengths of packed sequences, which the host reads.
_ALWAYS_ON_CPU = {"lengths", "batch_sizes"}

# Composite operators: the argument and the operator below them that CUDA's check names.
_BELOW = {
    "aten::embedding": ({"indices": "index", "weight": "self"}, "_index_select"),
    "aten::stack": ({}, "cat"),
    "aten::convolution": ({}, "_cudnn_convolution"),
}


def _names_in_cuda(func: Operator, argument: str) -> tuple[str, str]:
    """The names that the generated check prints for an argument and for an operator.

    torchgen writes ``overload_name`` for plain kernels, ``name_overload`` for structured ones.
    """
    if func._schema.name in _BELOW:
        arguments, method = _BELOW[func._schema.name]
        return arguments.get(argument, argument), method
    name, overload = func._schema.name.partition("::")[2], func._schema.overload_name
    if any(a.is_out for a in func._schema.arguments):
        name += "_out"
    if _is_structured(f"{name}.{overload}" if overload else name):
        return argument, f"{name}_{overload}" if overload else name
    return argument, f"{overload}_{name}"


def _is_structured(name: str) -> bool:
    """Whether torch's table of native functions, which every wheel holds, says so."""
    table = resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    _, _, entry = table.read_text("utf-8").partition(f"\n- func: {name}(")
    return "\n  structured" in entry.partition("\n- func:")[0]


def _is_cpu_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _named_tensors(
    func: Operator, args: Args, kwargs: Kwargs, skip: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor among the arguments with its parameter's name, but for the first ``skip``."""
    for position, argument in enumerate(func._schema.arguments[skip:]):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield argument.name, item
