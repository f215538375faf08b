"""In-place changes to a tensor's shape (``t_``, ``resize_``) or ``.data``, not to its values.

Other tensors may refer to the one that changes: views share its memory, and gradients belong to
their tensors. For plain tensors, autograd and torch handle this in C++; here, Python code does.
"""

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node

from vgpu.tensor.methods import HELD, TensorMethods
from vgpu.tensor.tensor import VirtualTensor
from vgpu.torch_patches.undo import Changes


def install(changes: Changes) -> None:
    changes.wrap(torch.Tensor, "data", data_across_devices)
    changes.wrap(torch, "_has_compatible_shallow_copy_type", has_compatible_type)


# In-place shape changes (``t_``, ``squeeze_``, ...) of a tensor whose memory other tensors view
#
# For a tensor subclass, autograd regenerates a view by replaying the view function on its base. If
# the shape of the base, or of the view itself, has changed since, the replay selects different
# elements. For plain tensors, autograd uses ``as_strided`` instead, so here, each affected view is
# first replaced with an ``as_strided`` view.

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

for name in RESHAPING:
    setattr(TensorMethods, name, keeping_views(getattr(torch.Tensor, name)))


# ``tensor.data = other`` across devices, which ``Module.to`` uses to preserve parameter identity
#
# For CPU and CUDA tensors, torch replaces the contents of the C++ tensor. A virtual tensor has a
# different Python class and different dispatch keys, so here the two Python objects swap their C++
# tensors and classes.


def data_across_devices(plain: Any) -> property:
    """Return the property ``Tensor.data``, extended to virtual tensors."""

    def set(tensor: torch.Tensor, source: torch.Tensor) -> None:
        if _of_other_kind(tensor, source):
            become(tensor, source)
            return
        if isinstance(tensor, VirtualTensor) and tensor.layout is source.layout is torch.strided:
            torch._C._set_conj(tensor, source.is_conj())
            torch._C._set_neg(tensor, source.is_neg())
        plain.__set__(tensor, source)
        if isinstance(tensor, VirtualTensor) and isinstance(source, VirtualTensor):
            tensor.__class__ = source.__class__
            for name in HELD:
                setattr(tensor, name, getattr(source, name))
            tensor._given_data = True
            if type(tensor) is VirtualTensor:
                # They share memory, but changing one's shape later doesn't affect the other's.
                tensor._inner = source._inner.detach()

    return property(plain.__get__, set)


def has_compatible_type(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap torch's check that ``input.data = from_`` works, made before it moves parameters."""

    # The parameters must have torch's names: torch.compile compares the signatures.
    def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
        if _of_other_kind(input, from_):
            return input.layout is torch.strided and from_.layout is torch.strided
        return plain(input, from_)

    return _has_compatible_shallow_copy_type


def _of_other_kind(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether C++ considers the tensors to be of different types."""
    if isinstance(tensor, VirtualTensor) and isinstance(source, VirtualTensor):
        # The keys differ for shapes on the host and for inference tensors.
        strided = tensor.layout is source.layout is torch.strided
        return strided and _keys(tensor) != _keys(source)
    return isinstance(tensor, VirtualTensor) != isinstance(source, VirtualTensor)


def _keys(tensor: torch.Tensor) -> int:
    """Return the dispatch keys by which C++ compares two tensors, except those it can change."""
    keys = torch._C._dispatch_keys(tensor)
    for mark in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        keys = keys.remove(mark)
    return keys.raw_repr()


def become(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give ``tensor`` the class and contents of ``source``; it stays the same object.

    The two are of different kinds: only one is virtual, or a shape on the host, or an inference
    tensor. ``requires_grad`` and other attributes are kept; the gradient is moved to the same
    device. Raises RuntimeError if ``tensor`` isn't a leaf, or is the gradient of another tensor.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "assigning .data of another device type to a tensor that is not a leaf is not "
            "supported on virtual GPUs; use .to(device) instead"
        )
    if not tensor.requires_grad and (holders := holders_of(tensor)):
        raise RuntimeError(
            "assigning .data of another device type to the gradient of a tensor of size "
            f"{tuple(holders[0].size())} on {holders[0].device} is not supported on virtual GPUs: "
            "move that tensor; its gradient follows"
        )
    grad = tensor.grad
    if grad is not None:
        tensor.grad = None
    try:
        if grad is not None:
            become(grad, grad.detach().to(source.device))
        _swap(tensor, source)
    except RuntimeError:
        if grad is not None:
            if grad.device != tensor.device:
                become(grad, grad.detach().to(tensor.device))
            tensor.grad = grad
        raise
    if grad is not None:
        tensor.grad = grad


def _swap(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Exchange the contents of two tensors; if that fails, both are unchanged."""
    content: Any = source.data.requires_grad_(tensor.requires_grad)
    if not content.is_inference() and not tensor.is_inference():  # keep the version counter
        torch._C._increment_version([content] * tensor._version)
    node = _accumulates(tensor) if tensor.requires_grad and not tensor.is_inference() else None
    attributes = {name: value for name, value in vars(tensor).items() if name not in HELD}
    held = {name: value for name, value in vars(content).items() if name in HELD}
    new_class: type[torch.Tensor] = torch.Tensor
    if isinstance(tensor, torch.nn.Parameter):
        attributes["_is_param"] = True
        new_class = torch.nn.Parameter
    if held:
        new_class = type(content)
    # The other object now has the old contents, which a graph may still need.
    old_class, old_attributes = tensor.__class__, dict(vars(tensor))
    try:
        torch._C._swap_tensor_impl(tensor, content)
    except RuntimeError as error:
        if "weakrefs" not in str(error):
            raise
        raise RuntimeError(
            f"a tensor of size {tuple(tensor.size())} cannot move from {tensor.device} to "
            f"{source.device}: something in C++ refers to it, as torch.profiler does with "
            "record_shapes or with_flops. On virtual GPUs, move the model before the profiler "
            "begins."
        ) from None
    if node is not None:
        _refuse_backward(node)
    for target, kind, names in (
        (tensor, new_class, {**attributes, **held}),
        (content, old_class, old_attributes),
    ):
        target.__class__ = kind
        vars(target).clear()
        vars(target).update(names)
    # The hooks' dicts stay with the Python object; set them again in C++.
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)


def _accumulates(tensor: torch.Tensor) -> Node:
    """Return the node that accumulates the tensor's gradient in existing graphs."""
    with torch.inference_mode(False):
        return torch.autograd.graph.get_gradient_edge(tensor).node


def _refuse_backward(node: Node) -> None:
    """Make existing graphs raise an error; gradients would go to the old contents."""

    def refuse(grad_outputs: Any) -> None:
        raise RuntimeError(
            "backward through a graph that was created before its parameters were moved to another "
            "device: run the forward pass again, or move the module before the forward pass"
        )

    node.register_prehook(refuse)
