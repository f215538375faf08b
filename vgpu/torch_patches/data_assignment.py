"""``tensor.data = other`` across devices, which ``Module.to`` uses to preserve parameter identity.

For CPU and CUDA tensors, torch replaces the contents of the C++ tensor. A virtual tensor has a
different Python class and different dispatch keys, so here the two Python objects swap their C++
tensors and classes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node

from vgpu.tensor import views
from vgpu.tensor.methods import HELD
from vgpu.tensor.tensor import VirtualTensor
from vgpu.torch_patches.undo import Changes


def install(changes: Changes) -> None:
    changes.wrap(torch.Tensor, "data", data_across_devices)
    changes.wrap(torch, "_has_compatible_shallow_copy_type", has_compatible_type)


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
                # They share memory, but changing one tensor's shape later doesn't affect the other's.
                tensor._inner = source._inner.detach()

    return property(plain.__get__, set)


def has_compatible_type(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the check that ``input.data = from_`` works, which precedes moving parameters."""

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
    """Return the dispatch keys by which C++ compares two tensors, without those that it can change."""
    keys = torch._C._dispatch_keys(tensor)
    for mark in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        keys = keys.remove(mark)
    return keys.raw_repr()


def become(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give ``tensor`` the class and contents of ``source``; it stays the same object.

    The two are of different kinds: only one is virtual, or a shape on the host, or an inference tensor.
    ``requires_grad`` and other attributes are kept; the gradient is moved to the same device.
    Raises RuntimeError if ``tensor`` isn't a leaf, or is the gradient of another tensor.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "assigning .data of another device type to a tensor that is not a leaf is not "
            "supported on virtual GPUs; use .to(device) instead"
        )
    if not tensor.requires_grad and (holders := views.holders_of(tensor)):
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
            f"{source.device}: something in C++ refers to it, as torch.profiler does with record_shapes "
            "or with_flops. On virtual GPUs, move the model before the profiler begins."
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
    """Make existing graphs raise an error: they'd accumulate gradients into the old, unused contents."""

    def refuse(grad_outputs: Any) -> None:
        raise RuntimeError(
            "backward through a graph that was created before its parameters were moved to another "
            "device: run the forward pass again, or move the module before the forward pass"
        )

    node.register_prehook(refuse)
