"""What an asynchronous collective promises: tensors on the virtual GPU that took part.

gloo works on the CPU tensors inside of virtual ones, and its futures hold those. One that comes out
is put on the GPU again whose memory counts its storage.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.tensor.tensor import VirtualTensor, wrap
from vgpu.torch_patches.undo import Changes


def install(changes: Changes) -> None:
    if dist.is_available():
        changes.wrap(dist.Work, "get_future", _then_virtual)
        changes.wrap(dist.Work, "result", _virtual_at_once)


def _virtual(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, VirtualTensor):
        return value
    if value.layout is not torch.strided or value.device.type != "cpu":
        return value
    block: Block | None = getattr(value.untyped_storage(), "_vgpu_block", None)
    if block is None:  # the CPU's own
        return value
    return wrap(value, gpus.by_index(block.memory.device.index), "get_future")


def _then_virtual(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Work.get_future``."""

    @functools.wraps(plain)
    def get_future(work: Any) -> Any:
        return plain(work).then(lambda done: pytree.tree_map(_virtual, done.value()))

    return get_future


def _virtual_at_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Work.result``."""

    @functools.wraps(plain)
    def result(work: Any) -> Any:
        return pytree.tree_map(_virtual, plain(work))

    return result
