"""The block ``with shapes_only():``, in which tensors made, moved or computed are shapes.

Devices, autograd, modules, optimizers, streams, memory counters and recordings work as ever.

A shape on the host (``torch.empty(...)`` in the block) is a ShapeTensor as well; only what Python
or NumPy already holds (``torch.tensor([1, 2])``) stays real until it moves to a GPU.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.vgpu.changes import Changes
from helpers.vgpu.device import gpus
from helpers.vgpu.dispatch.operators import Args, Kwargs, Operator
from helpers.vgpu.shapes.operations import dispatch
from helpers.vgpu.shapes.shape import is_shape


class _Mode(TorchDispatchMode):
    """Sends everything in the block to ``dispatch``, factories on the host included."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the guard against it takes longer than we do

    def __torch_dispatch__(
        self,
        func: Operator,
        types: tuple[type, ...],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {}, self)


@contextmanager
def shapes_only() -> Iterator[None]:
    """In the block, tensors made, or moved to or computed on virtual GPUs, are shapes.

    RuntimeError where virtual GPUs are not enabled. A model that moves in the block loses its
    values for good.
    """
    if gpus.device_count() == 0:
        raise RuntimeError("shapes_only needs virtual GPUs: call vgpu.enable(count) first")
    with _Mode():
        yield


def install(changes: Changes) -> None:
    changes.wrap(torch.nn.init, "_no_grad_trunc_normal_", trunc_normal)


def trunc_normal(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``nn.init.trunc_normal_``, which draws until every value lies inside: a shape has none."""

    @functools.wraps(plain)
    def _no_grad_trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if is_shape(tensor) else plain(tensor, *args, **kwargs)

    return _no_grad_trunc_normal_
