"""Answers that run on real ranks: started under a short time limit, their collectives counted."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import launch
from helpers.checks.blame import own_line_in
from helpers.checks.core import Wrong

TIMEOUT_S = 3.0
"""From the moment all ranks have met; a right answer takes milliseconds."""

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


def on_ranks(function: Callable[..., Any], nprocs: int, *args: Any, given: str) -> list[Any]:
    """``launch.run``; what goes wrong on the ranks becomes a verdict that says where."""
    try:
        return launch.run(function, nprocs, *args, timeout_s=TIMEOUT_S, output="by rank")
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
        raise Wrong(
            yours=str(raised).partition("\n")[0],
            expected="an answer from every rank",
            given=given,
            hint=own_line_in(str(raised)),
        ) from raised
    except launch.RankDied as died:
        raise Wrong(
            yours=str(died),
            expected="an answer from every rank",
            given=given,
            hint="Sizes or dtypes that differ between ranks can end a process like this.",
        ) from died


def answer_counted(
    rank: int, world_size: int, answer: Callable[[torch.Tensor], Any], tensors: list[torch.Tensor]
) -> tuple[Any, Calls]:
    """On a rank: the answer for the rank's tensor, and which collectives it called."""
    with _Noted() as noted:
        result = answer(tensors[rank].clone())
    return result, noted.calls


def counted(
    rank: int, world_size: int, answer: Callable[..., Any], *args: Any
) -> tuple[Any, Calls]:
    """On a rank: what ``answer(rank, world_size, *args)`` returns, and the collectives it called."""
    with _Noted() as noted:
        result = answer(rank, world_size, *args)
    return result, noted.calls


class _Noted(TorchDispatchMode):
    """Notes what a block sends or receives: whatever it calls, c10d's operators carry it out.

    No frame of ours is on the stack while a collective waits, so that a hang is reported on the
    learner's own line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function):
            name = function.overloadpacket.__name__.strip("_")
            self.calls.append((_FUNCTION.get(name, name), _largest(args)))
        return function(*args, **(kwargs or {}))


def _largest(arguments: Any) -> int:
    """Elements of the largest tensor among arguments, which may be lists of lists of tensors."""
    if isinstance(arguments, torch.Tensor):
        return arguments.numel()
    if isinstance(arguments, list | tuple):
        return max(map(_largest, arguments), default=0)
    return 0
