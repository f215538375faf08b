"""Checks for lesson 06: collectives on unequal shards, a ring all-reduce, and hangs."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from helpers.checks.core import Wrong, exercise, expect_close, for_input
from helpers.checks.describing import describe
from helpers.checks.on_ranks import answer_on_gpu, on_ranks
from vgpu.profiling import count_collectives_on_gpu


@exercise("6.1", "all_reduce from two halves")
def all_reduce_of_two_halves(answer: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    for ranks, dtype in ((2, torch.float64), (3, torch.int64)):
        length = ranks * random.randint(2, 9)
        tensors = [torch.randint(-99, 99, (length,)).to(dtype) for _ in range(ranks)]
        kind = str(dtype).removeprefix("torch.")
        given = f"{ranks} ranks, each with {length} {kind} elements"
        results = on_ranks(answer_on_gpu, ranks, answer, tensors, given=given)
        for rank, (yours, calls) in enumerate(results):
            with for_input(f"{given}; on rank {rank}"):
                names = [name for name, _ in calls]
                if {"all_reduce", "reduce"} & set(names):
                    raise Wrong(
                        yours=f"calls {', '.join(names)}",
                        expected="reduce_scatter and all_gather",
                        hint="Compute the sum without all_reduce or reduce.",
                    )
                hint = _hint_for_sum(yours, sum(tensors), tensors[rank])
                expect_close(yours, sum(tensors), hint=hint)
                if sorted(names) != ["all_gather", "reduce_scatter"]:
                    hint = "The sum is right, but the budget is one call to each of these two collectives."
                    if set(names) == {"all_gather"}:
                        hint = (
                            "The sum is right, but over budget. Gathering full tensors sends n - 1 "
                            "of them to each rank; parts of the sum are enough."
                        )
                    elif "all_to_all" in names:
                        hint = (
                            "The sum is right. An all_to_all whose parts you then add is a "
                            "reduce_scatter: one call does both."
                        )
                    raise Wrong(
                        yours=f"calls {', '.join(names) or 'no collective'}",
                        expected="one reduce_scatter, then one all_gather",
                        hint=hint,
                    )
    return {
        "sums": "exactly equal on 2 and on 3 ranks",
        "each rank called": ", then ".join(f"{name} of {size} elements" for name, size in calls),
    }


def _hint_for_sum(yours: Any, total: Any, own: torch.Tensor) -> str:
    if not isinstance(yours, torch.Tensor):
        return "Return the sum as a tensor, on every rank."
    if yours.shape == own.shape and torch.equal(yours.to(own.dtype), own):
        return "This is still the rank's own tensor: return the tensor that the collectives filled."
    if yours.numel() < total.numel():
        return "This is only one part of the sum. Collect the other ranks' parts, too."
    if yours.shape == total.shape and yours.dtype != total.dtype:
        return "The sum and the tensor have different dtypes: create outputs with new_empty."
    return "The parts of the sum, in rank order, form the full sum."


@exercise("6.2", "A mean over unequal shards")
def mean_over_unequal_shards(answer: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    for ranks, with_empty in ((2, False), (3, True)):
        lengths = random.sample(range(1, 9), ranks)
        if with_empty:
            lengths[random.randrange(ranks)] = 0
        # Far apart, so that a mean of means isn't right by chance.
        shards = [torch.rand(length) + 5 * rank for rank, length in enumerate(lengths)]
        expected = torch.cat(shards).mean()
        given = f"{ranks} ranks with {', '.join(map(str, lengths))} values"
        results = on_ranks(answer_on_gpu, ranks, answer, shards, given=given)
        for rank, (yours, calls) in enumerate(results):
            with for_input(f"{given}; on rank {rank}"):
                number = _number(yours)
                hint = _hint_for_mean(number, shards, rank, talked=bool(calls))
                expect_close(number, expected.double(), hint=hint, rtol=1e-4, atol=1e-4)
        for rank, (_, calls) in enumerate(results):
            if len(calls) != 1 or calls[0][1] > 2:
                spent = ", ".join(f"{name} of {size} elements" for name, size in calls)
                raise Wrong(
                    yours=spent or "no collective",
                    expected="one collective, with at most two elements",
                    given=f"{given}; on rank {rank}",
                    hint="The mean is right, but over budget. Put the two numbers to be summed "
                    "into one tensor.",
                )
    return {
        "input": given,
        "your mean": f"{number.item():.6f} on every rank",
        "sent": "one collective, with two elements",
    }


def _number(yours: Any) -> torch.Tensor:
    single = isinstance(yours, torch.Tensor) and yours.numel() == 1
    if not single and (isinstance(yours, bool) or not isinstance(yours, int | float)):
        raise Wrong(
            yours=yours,
            expected="one number",
            hint="Every rank needs the mean: return it as a number or a tensor with one element.",
        )
    return torch.as_tensor(yours).detach().double().reshape(())


def _hint_for_mean(
    yours: torch.Tensor, shards: list[torch.Tensor], rank: int, *, talked: bool
) -> str:
    def near(other: torch.Tensor) -> bool:
        return torch.allclose(yours, other.double(), rtol=1e-4, atol=1e-4, equal_nan=True)

    # The mean of no values is NaN, and so is any sum that includes it.
    means = torch.stack([shard.mean() for shard in shards])
    if yours.isnan():
        return "The mean of no values is NaN. Add up sums and counts instead of means."
    if near(means.mean()):
        return (
            "This is the mean of the ranks' means: it counts a short shard as much as a long one."
        )
    if near(means.nan_to_num().mean()):
        return (
            "A rank without values must not count, and a short shard must count less than a long "
            "one."
        )
    if near(means[rank]) or near(shards[rank].sum()):
        if talked:
            return (
                "This is the rank's own value, although the ranks communicated: return the "
                "collective's result instead."
            )
        return "This is the rank's own value: the ranks have to communicate."
    if near(torch.cat(shards).sum()):
        return "This is the sum of all values: divide by how many there are across all ranks."
    if near(torch.cat(shards).sum() / len(shards)):
        return "Divide by the number of values, not by the number of ranks."
    return "Every rank needs the sum of all values and the number of all values."


@exercise("6.3", "Find the missing rank", callable_answer=False)
def find_the_missing_rank(never_came: Any) -> dict[str, Any]:
    given = "train_until with some_losses and a limit of 0.3"
    hint = (
        "Run train_until with a short timeout_s: the last line of the message says which rank "
        "never arrived."
    )
    if isinstance(never_came, bool) or not isinstance(never_came, int):
        expected = "a rank: an int, counted from 0"
        raise Wrong(yours=repr(never_came), expected=expected, given=given, hint=hint)
    if never_came != 2:
        expected = "the rank that the others wait for"
        raise Wrong(yours=f"rank {never_came}", expected=expected, given=given, hint=hint)
    return {"rank 2": "its third loss, 0.2, is below 0.3; the others wait in the third all_reduce"}


@exercise("6.4", "Stop together")
def stop_together(repaired: Callable[..., list[float]]) -> dict[str, Any]:
    for ranks, limit in ((2, 0.25), (3, 0.3)):
        early = random.randrange(ranks)
        if ranks == 2:
            losses = _two_falling_to_the_limit(early, limit)
        else:
            losses = _falling_losses(ranks, early, limit)
        expected = _averages(losses, limit)
        most = min(len(expected) + 1, len(losses[0]))
        given = f"losses {losses}, limit {limit}"
        results = on_ranks(count_collectives_on_gpu, ranks, repaired, losses, limit, given=given)
        for rank, (yours, calls) in enumerate(results):
            with for_input(f"rank {rank}, {given}"):
                _judge_averages(yours, expected, losses, limit)
                if len(calls) < len(expected):
                    raise Wrong(
                        yours=f"{len(calls)} collectives for {len(expected)} averages",
                        expected="one for each average",
                        hint="In a real training run, a rank doesn't know the other ranks' losses.",
                    )
                if len(calls) > most:
                    raise Wrong(
                        yours=f"{len(calls)} collectives in {most} steps",
                        expected=f"{most}, one per step",
                        hint="One all_reduce already tells every rank the average. Use it to "
                        "decide, and leave the loop.",
                    )
    return {
        "your averages": [round(average, 3) for average in yours],
        "collectives on each rank": len(calls),
        "stopped": f"all {ranks} ranks together, though rank {early} fell below {limit} first",
    }


def _judge_averages(
    yours: Any, expected: list[float], losses: list[list[float]], limit: float
) -> None:
    hint = "All ranks return the averages before the first one that's below the limit, or all of "
    hint += "them if none is."
    if not isinstance(yours, list):
        raise Wrong(yours=yours, expected=describe(expected), hint=hint)
    first, summed = yours[0] if yours else None, sum(of_rank[0] for of_rank in losses)
    if isinstance(first, int | float) and math.isclose(first, summed, rel_tol=1e-4):
        hint = "These are the sums of the ranks' losses: divide by the number of ranks."
    elif len(yours) == len(expected) + 1:
        hint = "The first average below the limit ends the loop and isn't returned."
    elif len(yours) == len(losses[0]) > len(expected):
        hint = (
            "The function never stops early: all ranks leave once the average is below the limit."
        )
    elif len(yours) < len(expected) and expected[len(yours)] == limit:
        hint = "It stops too early: an average that equals the limit isn't below it."
    elif len(yours) < len(expected):
        hint = "It stops too early: what counts is the average, not one rank's loss."
    expect_close(yours, expected, hint=hint, rtol=1e-4, atol=1e-4)


def _two_falling_to_the_limit(early: int, limit: float) -> list[list[float]]:
    """Return two ranks' losses, whose average ends at exactly the limit, even in float32."""
    above = sorted(random.sample(range(1, 20), 3), reverse=True)
    others = [limit + (2 * excess + 4) / 64 for excess in (*above, 0)]
    return [[limit - 4 / 64] * 4 if rank == early else others for rank in range(2)]


def _falling_losses(ranks: int, early: int, limit: float) -> list[list[float]]:
    """Return seven falling losses per rank; rank ``early`` falls below the limit first."""
    end = random.choice((3, 4))
    losses = []
    for _ in range(ranks):
        first = random.uniform(0.8, 1.0)
        falling = (first - (first - 0.28) * step / end for step in range(7))
        losses.append([round(max(loss, 0.1), 2) for loss in falling])
    losses[early] = [loss if step == 0 else 0.25 for step, loss in enumerate(losses[early])]
    assert any(average >= limit for average in _averages(losses, limit)[1:])
    return losses


def _averages(losses: list[list[float]], limit: float) -> list[float]:
    averages: list[float] = []
    for of_ranks in zip(*losses, strict=True):
        average = sum(of_ranks) / len(of_ranks)
        if average < limit:
            break
        averages.append(average)
    return averages


@exercise("6.5", "A ring all-reduce")
def ring_all_reduce(answer: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    sent: dict[int, str] = {}
    for ranks, length in ((3, 12), (2, 7), (4, 3)):
        tensors = [torch.randint(1, 9, (length,)).float() * 10**rank for rank in range(ranks)]
        total = torch.stack(tensors).sum(0)
        given = f"{ranks} ranks, each with {length} elements"
        results = on_ranks(answer_on_gpu, ranks, answer, tensors, given=given)
        for rank, (yours, calls) in enumerate(results):
            with for_input(f"{given}; on rank {rank}"):
                sizes = [size for name, size in calls if name == "send"]
                others = {name for name, _ in calls} - {"send", "recv"}
                if others:
                    raise Wrong(
                        yours=f"calls {', '.join(sorted(others))}",
                        expected="only sends and receives",
                        hint="Use only exchange to build the sum.",
                    )
                hint = _hint_for_ring(yours, total, tensors[rank], ranks)
                expect_close(yours, total, hint=hint)
                budget = 2 * (ranks - 1) * -(-length // ranks)
                if sum(sizes) > budget:
                    raise Wrong(
                        yours=f"{sum(sizes)} elements sent",
                        expected=f"at most {budget}: 2(n-1) chunks",
                        hint="The sum is right. Send one chunk in each step, not the full tensor.",
                    )
        sent[ranks] = (
            f"with {length} elements, the last rank sent {sum(sizes)} in {len(sizes)} messages"
        )
    return {f"{ranks} ranks": text for ranks, text in sorted(sent.items())}


def _hint_for_ring(yours: Any, total: torch.Tensor, own: torch.Tensor, ranks: int) -> str:
    if not isinstance(yours, torch.Tensor) or yours.shape != total.shape:
        return "Return the full sum, as a tensor, on every rank."
    if torch.equal(yours, own):
        return (
            "This is still the rank's own tensor: a chunk from tensor_split is a view, so write "
            "into it."
        )
    if (yours >= total).all():
        return (
            "Values were added more than once: in the last n - 1 steps, what arrives replaces "
            "what's there."
        )
    right = [
        torch.equal(mine, whole)
        for mine, whole in zip(yours.tensor_split(ranks), total.tensor_split(ranks), strict=True)
    ]
    if sum(right) == 1:
        return (
            "Only one chunk is complete, as expected after n - 1 steps. Go around the ring once "
            "more, replacing chunks."
        )
    return "In step s, counting from 0, rank r sends chunk (r - s) % n and receives chunk (r - s - 1) % n."
