"""The block ``with shapes_only():``, in which tensors have shapes, but no values.

Models of any size run without arithmetic, and without memory for values. Devices, autograd,
modules, optimizers, streams, memory counters and recordings work as usual.

Tensors created on the host (``torch.empty(...)`` in the block) are shapes, too. Tensors created
from Python or NumPy data (``torch.tensor([1, 2])``) stay real until they're moved to a GPU, and so
do integers created on the host (``torch.arange(8)``), because programs branch on them, as a mesh
does on its ranks.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode

from vgpu.memory import gpus
from vgpu.tensor import copies
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.tensor import ShapeTensor, around_shapes, is_shape, run
from vgpu.torch_patches.undo import Changes


class _Mode(TorchDispatchMode):
    """Dispatch mode that sends every operation in the block to ``run``, even host factories."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against compilation takes longer than the operation

    def __torch_dispatch__(
        self,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if _infra_mode(_FAKE) is not None:  # torch is propagating shapes itself, as DTensor does
            return func(*args, **(kwargs or {}))
        if types and types != _SHAPES and around_shapes(types):
            return NotImplemented
        return run(func, args, kwargs or {}, self)


_SHAPES = (ShapeTensor,)  # compared first: the types of nearly all calls
_infra_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE


@contextmanager
def shapes_only() -> Iterator[None]:
    """In the block, tensors that are created, computed, or moved to a virtual GPU are shapes.

    A model that's moved inside the block permanently loses its values. Raises RuntimeError if
    virtual GPUs aren't enabled.
    """
    if gpus.device_count() == 0:
        raise RuntimeError("shapes_only needs virtual GPUs: call vgpu.enable(count) first")
    with _Mode():
        yield


def install(changes: Changes) -> None:
    changes.append(_foreach_supported_types, ShapeTensor)  # see torch_patches/functions.py
    changes.wrap(torch.nn.init, "_no_grad_trunc_normal_", trunc_normal)
    changes.wrap(nn.parallel.distributed, "_verify_param_shape_across_processes", _of_values)
    changes.wrap(dist.Reducer, "_rebuild_buckets", _in_own_order)


def trunc_normal(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``nn.init.trunc_normal_`` to skip shapes: it redraws values until all are in range."""

    @functools.wraps(plain)
    def _no_grad_trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if is_shape(tensor) else plain(tensor, *args, **kwargs)

    return _no_grad_trunc_normal_


def _of_values(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap DDP's check that ranks have the same parameters: it needs values, so skip shapes."""

    @functools.wraps(plain)
    def _verify_param_shape_across_processes(
        process_group: dist.ProcessGroup, tensors: list[torch.Tensor], logger: Any = None
    ) -> Any:
        if any(is_shape(tensor) for tensor in tensors):
            return None
        return plain(process_group, tensors, logger)

    return _verify_param_shape_across_processes


def _in_own_order(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap DDP's broadcast of rank 0's bucket order: with shapes, each rank keeps its own order."""

    @functools.wraps(plain)
    def _rebuild_buckets(reducer: Any) -> Any:
        copies.host_keeps_values = True
        try:
            return plain(reducer)
        finally:
            copies.host_keeps_values = False

    return _rebuild_buckets
