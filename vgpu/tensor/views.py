"""In-place shape changes (``t_``, ``squeeze_``, ...) of a tensor whose memory other tensors view.

For a tensor subclass, autograd regenerates a view by replaying the view function on its base. If
the shape of the base, or of the view itself, has changed since, the replay selects different
elements. For plain tensors, autograd uses ``as_strided`` instead, so here, each affected view is
first replaced with an ``as_strided`` view.
"""

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch

# Methods that change sizes and strides; those in _RESIZING may also resize the storage.
_RESHAPING = ("as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
_RESIZING = ("resize_", "resize_as_")
RESHAPING = _RESHAPING + _RESIZING

_creation = torch._C._autograd.CreationMeta
_grad: Any = torch._C.TensorBase.grad
_data: Any = torch._C.TensorBase.data


def keeping_views(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a method in ``RESHAPING`` so that every view keeps its elements."""

    resizes = method.__name__ in _RESIZING

    @functools.wraps(method)
    def reshaped(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = self._base
        if resizes and self.requires_grad:
            return method(self, *args, **kwargs)  # autograd raises an error
        if base is None and not _refuses_changes(self):
            views = [view for view in _views_of(self) if _follows(view, self)]
            if views:
                method(self.data, *args, **kwargs)  # raises here if the call is invalid
            for view in views:
                _take_by_strides(view, self, view)
        if base is None or resizes or not _follows(self, base) or _refuses_changes(base):
            return method(self, *args, **kwargs)
        if self._backward_hooks and torch.is_grad_enabled():
            raise _refusal(self, "has a hook")
        probe = method(self.data, *args, **kwargs)
        if not _looks_like(self, probe):
            _take_by_strides(self, base, probe)
        torch._C._increment_version([self])
        return self

    return reshaped


def _views_of(base: Any) -> list[torch.Tensor]:
    """Return the views of a tensor that are Python objects."""
    kind = type(base)
    storage = base._inner.untyped_storage()
    shared = torch._C._storage_Use_Count(storage._cdata) > _UNSHARED
    if not shared and not base._given_data:
        return []
    return [one for one in gc.get_objects() if type(one) is kind and one._base is base]


def _follows(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether autograd would regenerate the view from its base (with ``as_strided`` on the CPU)."""
    if torch._C._autograd._get_creation_meta(view) != _creation.DEFAULT:
        return False  # autograd raises an error after the change
    if base.layout is not torch.strided or (view.dtype != base.dtype and not _is_part(view, base)):
        return False  # autograd replays the view function on the CPU, too
    if view.is_conj() != base.is_conj() or view.is_neg() != base.is_neg():
        return False  # likewise
    try:
        return not (view.requires_grad and view.is_leaf)
    except RuntimeError:
        return False  # a view of the base's earlier shape: only a graph still holds it


def _is_part(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the view shows the real or imaginary part of its base."""
    return base.is_complex() and not base.is_conj() and view.dtype is base.dtype.to_real()


def _refuses_changes(base: torch.Tensor) -> bool:
    """Whether autograd refuses to change the tensor, or a view of it, in place."""
    return torch.is_grad_enabled() and base.requires_grad and base.is_leaf


def _take_by_strides(view: Any, base: Any, like: Any) -> None:
    """Make ``view`` an ``as_strided`` view of ``base`` with ``like``'s size, strides and offset.

    Its values stay in their own memory: ``base.data = other`` may have moved the base to other
    memory.
    """
    geometry = like.size(), like.stride(), like.storage_offset()
    with torch.enable_grad():
        parts: Any = torch.view_as_real(base) if _is_part(view, base) else base
        same = parts.as_strided(*geometry)
    inner = same._inner if view._inner.is_meta else view._inner.as_strided(*geometry)
    if view.retains_grad:
        raise _refusal(view, "retains a gradient")
    same._inner, view._inner = view._inner, inner
    swap_insides(view, same)


def swap_insides(tensor: Any, other: Any) -> None:
    """Swap the C++ tensors of two Python tensors.

    Tensors whose gradient is ``tensor`` keep it, and ``tensor`` keeps its gradient.
    """
    grad, holders = _grad_of(tensor), holders_of(tensor)
    torch._C._swap_tensor_impl(tensor, other)
    if grad is not None:
        _set_grad(tensor, grad)
    for holder in holders:
        _set_grad(holder, tensor)


def holders_of(grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose gradient is ``grad``."""
    if grad._use_count() == 1:  # type: ignore[attr-defined, unused-ignore]  # no reference from C++
        return []
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [one for one in tensors if _grad_of(one) is grad]


def _grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    with warnings.catch_warnings():  # torch warns if the tensor isn't a leaf
        warnings.simplefilter("ignore")
        grad: torch.Tensor | None = _grad.__get__(tensor)
    return grad


def _set_grad(tensor: Any, grad: Any) -> None:
    """Set ``tensor.grad = grad``, even if an in-place change has given them different sizes."""
    own = tensor.data
    if own.size() != grad.size():
        _data.__set__(tensor, grad.data)
    _grad.__set__(tensor, grad)
    if own.size() != grad.size():
        _data.__set__(tensor, own)


def _refusal(view: torch.Tensor, found: str) -> RuntimeError:
    return RuntimeError(
        f"a view of size {tuple(view.size())} on {view.device} {found}, so no tensor that "
        "shares its memory can change its shape in place on a virtual GPU: use the operation that "
        "returns a new view (t() for t_(), and so on)"
    )


def _looks_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.size() == other.size() and one.stride() == other.stride()


def _use_count_of_one() -> int:
    storage = torch.empty(1, device="cpu").untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


# The use count, as seen from Python, of a storage that only one tensor holds.
_UNSHARED = _use_count_of_one() + 1
