"""Writes down what PyTorch is asked for: operations, and on a rank the collectives of an answer.

On a rank with a GPU, NCCL's rule holds, on virtual GPUs as well: what a collective is given must be
there. Ranks import this file, so it imports next to nothing of ours.
"""

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from vgpu.profiling.watching import Watching, collective_name

# What makes a second set of bytes out of a first: between devices or dtypes, into, and beside it.
_COPYING = ("_to_copy", "copy_", "clone")


class Calls(Watching):
    """The operations that reach PyTorch's dispatcher inside a ``with`` block, in order.

    ``names`` holds their plain names ("zeros", "mul", "_to_copy"), ``made`` each with its keyword
    arguments as one text, "_to_copy(device=cuda:0)"; None and False are left out. Views and calls that hand back
    what they were given, such as ``.to`` to the same device, dispatch no copy and list none. Only
    the thread that enters the block is watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = ", ".join(f"{key}={value}" for key, value in (kwargs or {}).items() if value)
        self.names.append(name)
        self.made.append(f"{name}({given})")
        return func(*args, **(kwargs or {}))

    @property
    def copies(self) -> int:
        """How many of the operations copied a tensor."""
        return sum(name in _COPYING for name in self.names)


# Collectives

# A collective's name, and how many numbers this rank gave to it (for a receive: how many came).
Collectives = list[tuple[str, int]]


def own_gpu() -> torch.device:
    """On a rank that has a GPU: which one."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, int(os.environ["LOCAL_RANK"]))


def answer_counted(
    rank: int, world_size: int, answer: Callable[[torch.Tensor], Any], tensors: list[torch.Tensor]
) -> tuple[Any, Collectives]:
    """On a rank with a GPU: the answer for the rank's tensor, which lies there, and which
    collectives it called."""
    tensor = tensors[rank].to(own_gpu())
    with _Noted(own_gpu()) as noted:
        result = answer(tensor)
    if isinstance(result, torch.Tensor):
        if result.dim() and result.device != tensor.device:
            raise TypeError(
                f"the answer is on the {result.device.type}, and the tensor came on "
                f"{tensor.device}: {_MAKE_IT_THERE}"
            )
        result = result.cpu()
    return result, noted.calls


def counted(
    rank: int, world_size: int, answer: Callable[..., Any], *args: Any
) -> tuple[Any, Collectives]:
    """On a rank: what ``answer(rank, world_size, *args)`` returns, and the collectives it called."""
    with _Noted() as noted:
        result = answer(rank, world_size, *args)
    return result, noted.calls


def counted_on_gpu(
    rank: int, world_size: int, answer: Callable[..., Any], *args: Any
) -> tuple[Any, Collectives]:
    """The same on a rank with a GPU: a collective of CPU tensors is refused."""
    with _Noted(own_gpu()) as noted:
        result = answer(rank, world_size, *args)
    return result, noted.calls


_MAKE_IT_THERE = (
    "make it there, with device=..., or with new_tensor and new_empty of a tensor there"
)


class _Noted(Watching):
    """Notes what a block sends or receives: whatever it calls, c10d's operators carry it out.

    With a GPU, it raises TypeError for what NCCL would not carry. No frame of ours is on the stack
    while a collective waits, so that a hang is reported on the learner's own line.
    """

    def __init__(self, gpu: torch.device | None = None) -> None:
        super().__init__()
        self.calls: Collectives = []
        self._gpu = gpu

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if name := collective_name(function):
            self.calls.append((name, _given(function, args)))
            if self._gpu and name != "barrier" and any(t.is_cpu for t in _tensors(args)):
                self._refuse(name)
        return function(*args, **(kwargs or {}))

    def _refuse(self, name: str) -> None:
        # Python objects travel as bytes on the CPU, where the group has a backend for it.
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if "object" in frame.f_code.co_name:
                return
            frame = frame.f_back
        raise TypeError(
            f"{name} was given a CPU tensor, and NCCL carries only what is on the rank's GPU, here "
            f"{self._gpu}: {_MAKE_IT_THERE}"
        )


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, which may be lists of lists of them."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from _tensors(argument)


def _given(function: Any, arguments: tuple[Any, ...]) -> int:
    """Elements that a collective's operator takes in, without those of the tensors that it fills."""
    named = zip(function._schema.arguments, arguments, strict=False)
    inputs = [value for argument, value in named if not argument.name.startswith("output")]
    return sum(tensor.numel() for tensor in _tensors(inputs))
