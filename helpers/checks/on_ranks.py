"""Answers that run on real ranks: started under a short time limit, their collectives counted.

With ``GPU`` each rank has a GPU, as in the lesson, and NCCL's rule holds on virtual ones as well:
what a collective is given must be there.
"""

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import launch
from helpers.checks.blame import hint_in, own_line_in
from helpers.checks.core import Wrong

TIMEOUT_S = 3.0
"""From the moment all ranks have met; a right answer takes milliseconds."""

GPU = "V100"
"""What ranks have where there are too few real GPUs."""

# Operators of torch.ops.c10d, by the name of the function that calls them. Those not named here
# are called as their function, but for underscores.
_FUNCTION = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
}

# A collective's name, and how many numbers were in its largest tensor.
Calls = list[tuple[str, int]]


def on_ranks(
    function: Callable[..., Any], nprocs: int, *args: Any, given: str, gpu: str | None = None
) -> list[Any]:
    """``launch.run``; what goes wrong on the ranks becomes a verdict that says where."""
    try:
        return launch.run(function, nprocs, *args, timeout_s=TIMEOUT_S, output="by rank", gpu=gpu)
    except TypeError as unsent:
        raise Wrong(
            yours=str(unsent.__cause__ or unsent),
            expected="a function that can be sent to other processes",
            hint="Make such a thing inside the function, on each rank.",
        ) from unsent
    except launch.RanksHung as hang:
        raise Wrong(
            yours="no answer: not every rank returned",
            expected="an answer from every rank",
            given=given,
            hint=f"{hang}\nEvery rank must call the same collectives, in the same order, with sizes "
            "that fit.",
        ) from hang
    except launch.RankRaised as raised:
        cause = raised.__cause__
        if type(cause) is NotImplementedError and not cause.args:
            raise NotImplementedError from raised
        first = str(raised).partition("\n")[0]
        raise Wrong(
            yours=first,
            expected="an answer from every rank",
            given=given,
            hint="\n".join(filter(None, (own_line_in(str(raised)), hint_in(first)))),
        ) from raised
    except launch.RankDied as died:
        raise Wrong(
            yours=str(died),
            expected="an answer from every rank",
            given=given,
            hint="Sizes or dtypes that differ between ranks can end a process like this.",
        ) from died


def own_gpu() -> torch.device:
    """On a rank that has a GPU: which one."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, int(os.environ["LOCAL_RANK"]))


def answer_counted(
    rank: int, world_size: int, answer: Callable[[torch.Tensor], Any], tensors: list[torch.Tensor]
) -> tuple[Any, Calls]:
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
) -> tuple[Any, Calls]:
    """On a rank: what ``answer(rank, world_size, *args)`` returns, and the collectives it called."""
    with _Noted() as noted:
        result = answer(rank, world_size, *args)
    return result, noted.calls


def counted_on_gpu(
    rank: int, world_size: int, answer: Callable[..., Any], *args: Any
) -> tuple[Any, Calls]:
    """The same on a rank with a GPU: a collective of CPU tensors is refused."""
    with _Noted(own_gpu()) as noted:
        result = answer(rank, world_size, *args)
    return result, noted.calls


_MAKE_IT_THERE = (
    "make it there, with device=..., or with new_tensor and new_empty of a tensor there"
)


class _Noted(TorchDispatchMode):
    """Notes what a block sends or receives: whatever it calls, c10d's operators carry it out.

    With a GPU, it raises TypeError for what NCCL would not carry. No frame of ours is on the stack
    while a collective waits, so that a hang is reported on the learner's own line.
    """

    def __init__(self, gpu: torch.device | None = None) -> None:
        super().__init__()
        self.calls: Calls = []
        self._gpu = gpu

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function):
            name = function.overloadpacket.__name__.strip("_")
            name = _FUNCTION.get(name, name)
            self.calls.append((name, _largest(args)))
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


def _largest(arguments: Any) -> int:
    """Elements of the largest tensor among arguments."""
    return max((tensor.numel() for tensor in _tensors(arguments)), default=0)
