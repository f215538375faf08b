"""Operators that PyTorch is asked for, collectives that a rank calls, and the bytes that it sends.

Whatever calls a collective, a DTensor or a backward pass, the operators of collectives/table.py carry it
out, on virtual GPUs, real ones and the CPU alike. Ranks import this file, so it imports no DTensor,
which takes a second.
"""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vgpu.collectives import table
from vgpu.collectives.calls import Call


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that costs no import.

    By default torch guards a mode against being compiled, and imports its whole compiler for that at
    the first call, which takes seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# What makes a second set of bytes out of a first: between devices or dtypes, into, and beside it.
_COPYING = ("_to_copy", "copy_", "clone")


class OperatorLog(EagerDispatchMode):
    """The operators that reach PyTorch's dispatcher inside a ``with`` block, in order.

    ``names`` holds their plain names ("zeros", "mul", "_to_copy"), ``lines`` each with its keyword
    arguments as one text, "_to_copy(device=cuda:0)"; None and False are left out. Views and calls that
    return what they were given, such as ``.to`` to the same device, dispatch no copy and list none.
    Only the thread that enters the block is logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        arguments = ", ".join(f"{key}={value}" for key, value in (kwargs or {}).items() if value)
        self.names.append(name)
        self.lines.append(f"{name}({arguments})")
        return func(*args, **(kwargs or {}))

    @property
    def copies(self) -> int:
        """How many of the operators copied a tensor."""
        return sum(name in _COPYING for name in self.names)


class CollectiveObserver(EagerDispatchMode):
    """Calls ``see`` before each collective inside a ``with`` block, also of a backward pass there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtensors = sys.modules.get("torch.distributed.tensor")
        if dtensors and any(issubclass(kind, dtensors.DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors of this rank
        if func._schema.name in table.NAMES:
            self.see(table.read_call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def see(self, call: Call) -> None:
        raise NotImplementedError


class CollectiveCounter(CollectiveObserver):
    """Counts what this rank sends inside a ``with`` block, also in a backward pass that runs there.

    ``calls`` has each collective's name and the bytes of the whole tensor as nccl-tests counts them
    (doc/PERFORMANCE.md): for ``all_gather`` the gathered one, for ``reduce_scatter`` the one before.
    ``sent_bytes`` is what the rank sends for all of them, each around a ring. A barrier counts as
    nothing. NotImplementedError for ``gather`` and ``scatter``, in which ranks send unequally much.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.sent_bytes = 0.0

    @property
    def names(self) -> list[str]:
        """The collectives' names, in order."""
        return [name for name, _ in self.calls]

    def see(self, call: Call) -> None:
        if call.name != "barrier":
            self.sent_bytes += table.sent_bytes(call.name, call.size_bytes, call.group.size())
            self.calls.append((call.name, call.size_bytes))


# On a rank

# A collective's name, and how many numbers this rank put in (of a receive: how many came).
CollectiveCalls = list[tuple[str, int]]


def own_gpu() -> torch.device:
    """On a rank that has a GPU: which one."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))


def count_collectives(
    rank: int, world_size: int, function: Callable[..., Any], *args: Any
) -> tuple[Any, CollectiveCalls]:
    """On a rank: what ``function(rank, world_size, *args)`` returns, and the collectives it called."""
    with _InputCounter(None) as counter:
        result = function(rank, world_size, *args)
    return result, counter.calls


def count_collectives_on_gpu(
    rank: int, world_size: int, function: Callable[..., Any], *args: Any
) -> tuple[Any, CollectiveCalls]:
    """The same on a rank with a GPU; TypeError for a collective of CPU tensors.

    NCCL's rule, on virtual GPUs as well: what a collective is given must be on the rank's GPU.
    """
    with _InputCounter(own_gpu()) as counter:
        result = function(rank, world_size, *args)
    return result, counter.calls


MAKE_IT_ON_THE_GPU = (
    "make it there, with device=..., or with new_tensor and new_empty of a tensor there"
)


class _InputCounter(CollectiveObserver):
    """What a block puts into collectives, in numbers of elements."""

    def __init__(self, gpu: torch.device | None) -> None:
        super().__init__()
        self.calls: CollectiveCalls = []
        self._gpu = gpu

    def see(self, call: Call) -> None:
        counted = call.outputs if call.name == "recv" else call.inputs
        self.calls.append((call.name, sum(tensor.numel() for tensor in counted)))
        on_cpu = any(tensor.is_cpu for tensor in (*call.inputs, *call.outputs))
        if self._gpu and on_cpu and call.name != "barrier" and not _carries_pickles():
            raise TypeError(
                f"{call.name} was given a CPU tensor, and NCCL carries only what is on the rank's GPU, "
                f"here {self._gpu}: {MAKE_IT_ON_THE_GPU}"
            )


def _carries_pickles() -> bool:
    """Whether it is for Python objects: bytes on the CPU, where the group has a backend for it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "object" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False
