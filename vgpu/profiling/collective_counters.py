"""What a rank sends in collectives, those of DTensors and of the backward pass included."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from vgpu.profiling.watching import Watching, collective_name

# What each rank sends around a ring of n, of a tensor's bytes; see vgpu/timing/collectives.py.
_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
}


class _Collectives(Watching):
    """Shows ``_note`` each collective inside a ``with`` block, also of a backward pass there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors of this rank
        name = collective_name(func)
        if name and "barrier" not in name:  # which sends nothing to speak of
            self._note(name, func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        raise NotImplementedError


class ParametersGathered(_Collectives):
    """Counts the all-gathers of floating-point numbers.

    A checkpoint's plans of what to read are gathered as well, as Python objects: those travel as
    integers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if "gather" in name:
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.count += any(tensor.is_floating_point() for tensor in tensors)


class Sent(_Collectives):
    """Counts what this rank sends inside a ``with`` block, also in a backward pass that runs there.

    ``calls`` has each collective's name and the bytes of the whole tensor as nccl-tests counts them
    (doc/PERFORMANCE.md): for ``all_gather`` the gathered one, for ``reduce_scatter`` the one before.
    ``size_bytes`` is what the rank sends for all of them, each around a ring. NotImplementedError
    for other collectives than ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` and
    ``broadcast``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.size_bytes = 0.0

    @property
    def names(self) -> list[str]:
        """The collectives' names, in order."""
        return [name for name, _ in self.calls]

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if name not in _SENT:
            raise NotImplementedError(f"Sent counts {', '.join(_SENT)}; {func} is none of them")
        count = _group_of(args).size()
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        size_bytes = sum(sizes)
        # An operator of c10d also gets the tensors that it fills.
        filled = func.namespace == "c10d"
        if name == "all_gather" or (name == "reduce_scatter" and filled):
            size_bytes = count * min(sizes)
        elif name == "all_to_all" and filled:
            size_bytes //= 2
        self.calls.append((name, size_bytes))
        self.size_bytes += size_bytes * _SENT[name](count)


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for value in reversed(args):
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str) and value not in ("sum", "avg"):
            return _resolve_process_group(value)  # type: ignore[arg-type]
    raise AssertionError(f"no process group among {args}")
