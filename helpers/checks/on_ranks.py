"""Run answers on real ranks, with a time limit; errors become verdicts."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from helpers.checks.blame import hint_in, own_line_in
from helpers.checks.core import Wrong
from vgpu import launch
from vgpu.profiling import (
    MAKE_IT_ON_THE_GPU,
    CollectiveCalls,
    count_collectives_on_gpu,
    own_gpu,
)

TIMEOUT_S = 30.0
"""The time limit once all ranks have joined the process group.

Correct answers come close to it only on a busy machine.
"""

GPU = "V100"
"""The model of each rank's virtual GPU, if there aren't enough real GPUs."""

_TRY_IT = (
    "Call it through launch.run in a cell of your own, where you can print intermediate values."
)


def on_ranks(
    function: Callable[..., Any],
    nprocs: int,
    *args: Any,
    given: str,
    gpu: str | None = GPU,
) -> list[Any]:
    """Call ``launch.run``; turn errors on ranks into a verdict that says where they happened."""
    try:
        return launch.run(function, nprocs, *args, timeout_s=TIMEOUT_S, gpu=gpu)
    except TypeError as unsent:
        raise Wrong(
            yours=str(unsent.__cause__ or unsent),
            expected="a function that can be sent to other processes",
            hint="Create it inside the function, on each rank.",
        ) from unsent
    except launch.RanksHung as hang:
        hint = "Every rank must call the same collectives, in the same order, with matching sizes."
        yours = "no answer: not every rank returned"
        raise _no_answer(yours, given, f"{hang}\n{hint}") from hang
    except launch.RankRaised as raised:
        cause = raised.__cause__
        if type(cause) is NotImplementedError and not cause.args:
            raise NotImplementedError from raised
        first = str(raised).partition("\n")[0]
        hint = "\n".join(filter(None, (own_line_in(str(raised)), hint_in(first)))) or _TRY_IT
        raise _no_answer(first, given, hint) from raised
    except launch.RankDied as died:
        hint = "Sizes or dtypes that differ between ranks can crash a process like this."
        raise _no_answer(str(died), given, hint) from died


def _no_answer(yours: str, given: str, hint: str) -> Wrong:
    return Wrong(yours=yours, expected="an answer from every rank", given=given, hint=hint)


def answer_on_gpu(
    rank: int, world_size: int, answer: Callable[[torch.Tensor], Any], tensors: list[torch.Tensor]
) -> tuple[Any, CollectiveCalls]:
    """Return a rank's answer for its tensor on its GPU, and the collectives that it called."""
    tensor = tensors[rank].to(own_gpu())
    result, calls = count_collectives_on_gpu(rank, world_size, lambda *_: answer(tensor))
    if isinstance(result, torch.Tensor):
        if result.dim() and result.device != tensor.device:
            raise TypeError(
                f"the answer is on the {result.device.type}, but the tensor was on "
                f"{tensor.device}: {MAKE_IT_ON_THE_GPU}"
            )
        result = result.cpu()
    return result, calls


def run_backward(loss: torch.Tensor, instead: str) -> None:
    """Call ``loss.backward()`` on a rank; raise ValueError if it goes through a plain collective.

    PyTorch only warns: a c10d collective has no derivative, and autograd passes gradients through
    as if the collective weren't there. The message says what to do ``instead``.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    if any("autograd kernel was not registered" in str(warning.message) for warning in caught):
        raise ValueError(
            "a collective was called with a tensor that requires a gradient, and backward knows "
            f"nothing about collectives: {instead}"
        )
