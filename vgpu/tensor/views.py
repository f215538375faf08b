"""In-place changes of a tensor's shape (``t_``, ``squeeze_``, ...), and the views of its memory.

For a tensor of a Python class, autograd differentiates a view by replaying how it was taken from
its base. After the base, or the view itself, has changed its shape, the replay would take other
elements. On the CPU autograd goes by size and strides instead. So here what changes its shape becomes
a view by size and strides: a view one of its base, and a base one of itself as it was, which the
other views keep.

Left out: tensors that require no gradient yet while C++ holds them, such as those that have views;
views of a base that loses elements (``resize_``, ``as_strided_``), or was given other memory
(``base.data = other``).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

# Methods that change sizes and strides.
RESHAPING = ("as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")

_creation = torch._C._autograd.CreationMeta
_grad: Any = torch._C.TensorBase.grad
_data: Any = torch._C.TensorBase.data


def keeping_elements(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A method of ``RESHAPING`` after which every view still shows the same elements."""

    @functools.wraps(method)
    def reshaped(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _is_concerned(self):
            return method(self, *args, **kwargs)
        if self._backward_hooks and torch.is_grad_enabled():
            raise _refusal(self, "has a hook")
        probe = method(self.data, *args, **kwargs)
        if not _looks_like(self, probe):
            _take_by_strides(self, self if self._base is None else self._base, probe)
        torch._C._increment_version([self])
        return self

    return reshaped


def _is_concerned(tensor: Any) -> bool:
    """Whether autograd may replay a view of, or to, a tensor that changes its shape."""
    if not tensor.requires_grad and tensor._use_count() > 1:
        return False  # C++ holds it, maybe as a gradient, which must stay what it is
    base = tensor._base
    if base is not None:
        return _follows(tensor, base) and not _refuses_changes(base)
    storage = tensor._inner.untyped_storage() if tensor.layout is torch.strided else None
    if storage is None or torch._C._storage_Use_Count(storage._cdata) <= _UNSHARED:
        return False
    return not (tensor.requires_grad and tensor.is_leaf)


def _use_count_of_one() -> int:
    storage = torch.empty(1, device="cpu").untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


# The use count of a storage that a single tensor holds, while Python looks at it.
_UNSHARED = _use_count_of_one() + 1


def _follows(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether autograd takes the history of a view from its base, by size and strides on the CPU."""
    if torch._C._autograd._get_creation_meta(view) != _creation.DEFAULT:
        return False  # autograd refuses it after the change
    if base.layout is not torch.strided or (view.dtype != base.dtype and not _is_part(view, base)):
        return False  # autograd replays it on the CPU, too
    if view.is_conj() != base.is_conj() or view.is_neg() != base.is_neg():
        return False  # likewise
    try:
        return not (view.requires_grad and view.is_leaf)
    except RuntimeError:
        return False  # of an earlier shape of the base: only a graph still has it


def _is_part(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the view shows real or imaginary parts of its base."""
    return base.is_complex() and not base.is_conj() and view.dtype is base.dtype.to_real()


def _refuses_changes(base: torch.Tensor) -> bool:
    """Whether autograd refuses to change the tensor, or a view of it, in place."""
    return torch.is_grad_enabled() and base.requires_grad and base.is_leaf


def _take_by_strides(view: Any, base: Any, like: Any) -> None:
    """Make ``view`` the view of ``base`` that has the size, strides and offset of ``like``.

    Its values stay in its own memory: ``base.data = other`` may have moved the base to another.
    """
    geometry = like.size(), like.stride(), like.storage_offset()
    with torch.enable_grad():
        parts: Any = torch.view_as_real(base) if _is_part(view, base) else base
        same = parts.as_strided(*geometry)
    inner = same._inner if view._inner.is_meta else view._inner.as_strided(*geometry)
    if view.retains_grad:
        raise _refusal(view, "retains a gradient")
    same._inner, view._inner = view._inner, inner
    grad = _grad_of(view)
    torch._C._swap_tensor_impl(view, same)
    if grad is not None:
        _set_grad(view, grad)


def _grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    with warnings.catch_warnings():  # torch warns where the tensor is not a leaf
        warnings.simplefilter("ignore")
        grad: torch.Tensor | None = _grad.__get__(tensor)
    return grad


def _set_grad(tensor: Any, grad: Any) -> None:
    """``tensor.grad = grad``, also of another size, as a change in place makes it."""
    own = tensor.data
    if own.size() != grad.size():
        _data.__set__(tensor, grad.data)
    _grad.__set__(tensor, grad)
    if own.size() != grad.size():
        _data.__set__(tensor, own)


def _refusal(view: torch.Tensor, found: str) -> RuntimeError:
    return RuntimeError(
        f"a tensor of size {tuple(view.size())} on {view.device} {found}, and "
        "cannot change its shape in place on a virtual GPU: use the operation that returns a new "
        "view (t() for t_(), and so on)"
    )


def _looks_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.size() == other.size() and one.stride() == other.stride()
