"""Counts dispatched operators, the collectives that a rank calls, and the bytes that it sends.

Every collective, even one called by a DTensor or a backward pass, is an operator in
collectives/table.py, on virtual GPUs, real GPUs and the CPU. Ranks import this file, so it doesn't
import DTensor, which takes a second.
"""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, Self
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from vgpu.collectives import table
from vgpu.collectives.table import Call


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that doesn't import the compiler.

    By default, torch guards a mode against compilation. To do so, it imports all of torch._dynamo
    on the first call, which takes seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Operators that copy a tensor to another device or dtype, to an existing tensor, or to a new one.
_COPYING = ("_to_copy", "copy_", "clone")


class OperatorLog(EagerDispatchMode):
    """The operators that reach PyTorch's dispatcher inside a ``with`` block, in order.

    ``names`` has their names ("zeros", "mul", "_to_copy"), and ``lines`` has each name with its
    keyword arguments, as in "_to_copy(device=cuda:0)"; None and False are omitted. Calls that
    return their argument, such as ``.to`` with the same device, dispatch nothing and aren't listed.
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
        """The number of operators that copied a tensor."""
        return sum(name in _COPYING for name in self.names)


class CollectiveObserver(EagerDispatchMode):
    """Calls ``see`` before each collective in a ``with`` block.

    This includes collectives in a backward pass, and in a future's callback, which runs on another
    thread: PowerSGD's communication hook for DDP calls some there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        # The class of a work's future, and the base class of torch.futures.Future.
        future: Any = torch._C.Future
        for name in ("then", "add_done_callback"):
            observed = self._observed(getattr(future, name))
            self._patches.enter_context(mock.patch.object(future, name, observed))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _observed(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that registers a callback, so that collectives in the callback are seen."""

        @functools.wraps(register)
        def registered(future: Any, callback: Callable[..., Any]) -> Any:
            def observed_callback(done: Any) -> Any:
                active = _get_current_dispatch_mode_stack()
                if any(getattr(mode, "observer", mode) is self for mode in active):
                    return callback(done)  # runs immediately, on an observed thread
                with _InCallback(self):
                    return callback(done)

            return register(future, observed_callback)

        return registered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtensors = sys.modules.get("torch.distributed.tensor")
        if dtensors and any(issubclass(kind, dtensors.DTensor) for kind in types):
            return NotImplemented  # it's dispatched again, with the local tensors
        if func._schema.name in table.NAMES:
            self.see(table.read_call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def see(self, call: Call) -> None:
        raise NotImplementedError


class _InCallback(EagerDispatchMode):
    """Observes on a callback's thread: a mode has state, so two threads can't share one."""

    def __init__(self, observer: CollectiveObserver) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.observer.__torch_dispatch__(func, types, args, kwargs)


class CollectiveCounter(CollectiveObserver):
    """Counts what this rank sends in a ``with`` block, including during backward.

    ``calls`` has each collective's name and size in bytes. As defined by nccl-tests
    (doc/PERFORMANCE.md), it's the size of the output for ``all_gather``, and of the input for
    ``reduce_scatter``. ``sent_bytes`` is the rank's total with ring algorithms; barriers don't
    count. Raises NotImplementedError for ``gather`` and ``scatter``, in which ranks send different
    amounts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self._sent_bytes: list[float] = []  # by call; appending is safe from multiple threads

    @property
    def sent_bytes(self) -> float:
        return sum(self._sent_bytes)

    @property
    def names(self) -> list[str]:
        """The collectives' names, in order."""
        return [name for name, _ in self.calls]

    def see(self, call: Call) -> None:
        if call.name != "barrier":
            sent_bytes = table.sent_bytes(call.name, call.size_bytes, call.group.size())
            self._sent_bytes.append(sent_bytes)
            self.calls.append((call.name, call.size_bytes))


# On a rank

# A collective's name, and the number of elements that this rank passed (or received, for "recv").
CollectiveCalls = list[tuple[str, int]]


def own_gpu() -> torch.device:
    """Return this rank's GPU."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))


def count_collectives(
    rank: int, world_size: int, function: Callable[..., Any], *args: Any
) -> tuple[Any, CollectiveCalls]:
    """Call ``function(rank, world_size, *args)`` on a rank; return its result and collectives."""
    with _InputCounter(None) as counter:
        result = function(rank, world_size, *args)
    return result, counter.calls


def count_collectives_on_gpu(
    rank: int, world_size: int, function: Callable[..., Any], *args: Any
) -> tuple[Any, CollectiveCalls]:
    """Like ``count_collectives``, but raise TypeError for a collective on CPU tensors.

    NCCL requires a collective's tensors to be on the rank's GPU, and so do virtual GPUs.
    """
    with _InputCounter(own_gpu()) as counter:
        result = function(rank, world_size, *args)
    return result, counter.calls


MAKE_IT_ON_THE_GPU = (
    "create it there, with device=..., or by calling new_tensor or new_empty on a tensor there"
)


class _InputCounter(CollectiveObserver):
    """Counts the elements that a block passes to collectives."""

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
                f"{call.name} was given a CPU tensor, and NCCL sends only tensors on the rank's "
                f"GPU, here {self._gpu}: {MAKE_IT_ON_THE_GPU}"
            )


def _carries_pickles() -> bool:
    """Whether the call is for Python objects, which may be sent as bytes on the CPU."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "object" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False
