"""Compare a computation's results on the CPU and on a virtual GPU.

Inputs keep their values, strides, offsets, lazy conjugations and shared tensors when they're copied
to the GPU. A virtual GPU runs the CPU's own kernels, so everything but the device must match.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

# Not vgpu:0: an index above 0 exposes code that forgets the index.
DEVICE = "vgpu:1"


class Disagreement(AssertionError):
    """A virtual GPU's result that differs from the CPU's."""


def to_gpu(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    """Return a copy of ``value`` with all tensors on the GPU, and its device in place of the CPU.

    moved: the tensors copied so far, by the original's id, so that each is copied only once.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in moved:
            moved[id(value)] = _tensor_to_gpu(value)
        return moved[id(value)]
    if isinstance(value, torch.device) and value.type == "cpu":
        return torch.device(DEVICE)
    if isinstance(value, str) and value == "cpu":
        return DEVICE
    if isinstance(value, slice):
        return slice(*(to_gpu(part, moved) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return type(value)((key, to_gpu(item, moved)) for key, item in value.items())
    if isinstance(value, list | tuple):
        items = [to_gpu(item, moved) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _tensor_to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the GPU with the same strides and offset, which ``to`` might change."""
    source = tensor.detach()
    if source.is_conj():
        copy = _tensor_to_gpu(source.conj()).conj()
    elif source.is_neg():
        copy = _tensor_to_gpu(torch._neg_view(source))._neg_view()
    elif source.layout is not torch.strided or _fills_its_storage(source):
        copy = source.to(DEVICE)
    else:
        length = source.untyped_storage().nbytes() // source.element_size()
        whole = source.as_strided((length,), (1,), 0).to(DEVICE)
        copy = whole.as_strided(source.size(), source.stride(), source.storage_offset())
    return copy.requires_grad_(tensor.requires_grad)


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def without_bases(value: Any) -> Any:
    """Return ``value`` with leaf tensors in place of views, whose bases would get the gradients."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf._base is None:
            return leaf
        return leaf.detach().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(own, value)


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def check_same(
    found: Any,
    expected: Any,
    what: str,
    values: bool = True,
    strides: bool = True,
    tolerance: float | None = None,
) -> None:
    """Raise Disagreement unless ``found``, on the GPU, matches ``expected``, on the CPU.

    values: False compares everything but the values, for uninitialized memory. strides: False
    ignores strides, for gradients: autograd accumulates gradients in place, but those of tensor
    subclasses out of place, and guarantees no strides either way. tolerance: both relative and
    absolute; the default is torch.testing's for the dtype.
    """
    found_leaves, found_structure = pytree.tree_flatten(found)
    expected_leaves, expected_structure = pytree.tree_flatten(expected)
    if found_structure != expected_structure:
        raise Disagreement(f"{what}: structure {found_structure}, expected {expected_structure}")
    for one, other in zip(found_leaves, expected_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            _check_same_tensor(one, other, what, values, strides, tolerance)
        elif isinstance(one, torch.Tensor):
            raise Disagreement(f"{what}: a tensor, expected {other}")
        elif isinstance(other, torch.device) and other.type == "cpu":
            _require(str(one) == DEVICE, what, "device", one, DEVICE)
        elif values:
            equal = one == other or (one != one and other != other)
            _require(bool(equal), what, "value", one, other)


def _check_same_tensor(
    found: torch.Tensor,
    expected: torch.Tensor,
    what: str,
    values: bool,
    strides: bool,
    tolerance: float | None,
) -> None:
    _require(isinstance(found, torch.Tensor), what, "type", type(found), type(expected))
    _require(str(found.device) == DEVICE, what, "device", found.device, DEVICE)
    for name in ("dtype", "layout", "shape", "requires_grad"):
        _require(
            getattr(found, name) == getattr(expected, name),
            what,
            name,
            getattr(found, name),
            getattr(expected, name),
        )
    if strides and expected.layout is torch.strided:
        _require(
            found.stride() == expected.stride(), what, "stride", found.stride(), expected.stride()
        )
    if values:
        torch.testing.assert_close(
            found.detach().cpu(),
            expected.detach(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )


def _require(holds: bool, what: str, name: str, found: Any, expected: Any) -> None:
    if not holds:
        raise Disagreement(f"{what}: {name} {found}, expected {expected}")


def run_seeded(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return the call's result after seeding the random number generators."""
    torch.manual_seed(0)
    return function(*args, **kwargs)


def check_same_outcome(on_cpu: Callable, on_gpu: Callable, what: str, **options: Any) -> tuple:
    """Return both results after comparing them, or None for both if both raise the same error."""
    try:
        expected = on_cpu()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as refusal:
        with pytest.raises(type(refusal)):
            on_gpu()
        return None, None
    found = on_gpu()
    check_same(found, expected, what, **options)
    return found, expected


def gradients(result: Any, inputs: Any) -> list[torch.Tensor | None]:
    """Return the gradients of all inputs that require them, for random gradients of the results."""
    outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    sources = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
    if not outputs or not sources:
        return []
    seeds = [_gradient_like(output) for output in outputs]
    return list(torch.autograd.grad(outputs, sources, seeds, allow_unused=True))


def _gradient_like(output: torch.Tensor) -> torch.Tensor:
    if output.layout is not torch.strided:
        return output.detach().clone()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    return values.to(output.device)
