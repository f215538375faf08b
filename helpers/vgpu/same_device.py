"""Which operands may lie on different devices, and CUDA's words for those that may not.

Only calls that mix devices come here. In CUDA three kinds of code check: TensorIterator for
elementwise operators, generated code in front of most others, and indexing itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

Check = Callable[[Any, tuple, dict], None]


def check_for(func: Any) -> Check:
    """The check for the operands of ``func``."""
    if func._schema.name in _INDEXING:
        return _check_indexing
    if torch.Tag.pointwise in func.tags or func._schema.name in _ELEMENTWISE:
        return _check_elementwise
    return _check_generated


_INDEXING = {
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
}
# TensorIterator's, but without torch's tag for it.
_ELEMENTWISE = {
    f"aten::{name}" for name in ("where", "lerp", "lerp_", "fill", "fill_", "masked_fill", "isin")
} | {"aten::masked_fill_"}


def _check_elementwise(func: Any, args: tuple, kwargs: dict) -> None:
    """CPU scalars mix with anything, but a result cannot be written to one."""
    written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    devices = [
        tensor.device
        for name, tensor in _named_tensors(func, args, kwargs)
        if not (_is_cpu_scalar(tensor) and name not in written)
    ]
    other = next((device for device in devices if device != devices[0]), None)
    if other is not None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, "
            f"but found at least two devices, {devices[0]} and {other}!"
        )
    if devices[0].type == "cpu":
        device = next(
            t.device for _, t in _named_tensors(func, args, kwargs) if t.device.type != "cpu"
        )
        raise RuntimeError(f"output with device cpu doesn't match the desired device {device}")


def _check_generated(func: Any, args: tuple, kwargs: dict) -> None:
    common = None
    for name, tensor in _named_tensors(func, args, kwargs):
        common = common or tensor.device
        if tensor.device != common:
            method = f"wrapper_VGPU_{func._schema.name.partition('::')[2]}"
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {name} is on "
                f"{tensor.device}, different from other tensors on {common} "
                f"(when checking argument in method {method})"
            )


def _check_indexing(func: Any, args: tuple, kwargs: dict) -> None:
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


def _is_cpu_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _named_tensors(
    func: Any, args: tuple, kwargs: dict, skip: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor among the arguments with its parameter's name, but for the first ``skip``."""
    for position, argument in enumerate(func._schema.arguments[skip:]):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield argument.name, item
