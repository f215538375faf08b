"""Checks for the exam's tasks that run on multiple ranks, each with a GPU."""

import random
from collections.abc import Callable
from typing import Any

import torch

from helpers.checks.core import Wrong, exercise, expect_close, expect_equal
from helpers.checks.on_ranks import on_ranks
from vgpu.profiling import CollectiveCalls, count_collectives_on_gpu, own_gpu


@exercise("99.5", "The largest across all ranks")
def largest_of_all(answer: Callable[[torch.Tensor, int], torch.Tensor]) -> dict[str, Any]:
    for ranks, k in ((2, 3), (3, 4)):
        lengths = [random.randint(k, 9) for _ in range(ranks - 1)] + [random.randint(0, k - 1)]
        numbers = torch.randperm(99)[: sum(lengths)].float() - 150  # all below zero
        scores = list(numbers.split(lengths))
        expected = numbers.topk(k).values
        given = f"k = {k} and {ranks} ranks with {lengths} scores"
        results = on_ranks(_on_gpu, ranks, _largest, answer, scores, k, given=given)
        for rank, ((yours, place), calls) in enumerate(results):
            hint = "All ranks return the k largest of all scores, in descending order."
            if isinstance(yours, torch.Tensor) and (yours == 0).any():
                hint = "All scores may be negative, so the placeholder for a missing one must lose."
            where = f"{given}; on rank {rank}"
            expect_equal(yours, expected, given=where, hint=hint)
            _on_its_gpu(place, where)
            _within(calls, 1, k, where, "k scores from each rank are enough.")
    return {"sent": f"one {calls[0][0]}, with {k} elements per rank"}


def _on_gpu(
    rank: int, world_size: int, call: Callable[..., Any], *args: Any
) -> tuple[Any, CollectiveCalls]:
    """Return what ``call`` returns on a rank, with tensors on the CPU, and its collectives."""
    result, calls = count_collectives_on_gpu(rank, world_size, call, *args)
    if isinstance(result, tuple):
        return tuple(_fetched(part) for part in result), calls
    return _fetched(result), calls


def _fetched(value: Any) -> Any:
    if isinstance(value, list):
        return [_fetched(part) for part in value]
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _largest(
    rank: int, world_size: int, answer: Callable[..., Any], scores: list[torch.Tensor], k: int
) -> tuple[Any, str]:
    yours = answer(scores[rank].to(own_gpu()), k)
    return yours, _place(yours)


def _place(yours: Any) -> str:
    """Say which device a tensor is on if that's not the rank's GPU; otherwise return ""."""
    elsewhere = isinstance(yours, torch.Tensor) and yours.device != own_gpu()
    return f"{yours.device}, but the rank's GPU is {own_gpu()}" if elsewhere else ""


def _on_its_gpu(place: str, given: str) -> None:
    if place:
        raise Wrong(
            yours=f"a tensor on {place}",
            expected="one on the rank's GPU",
            given=given,
            hint="The values are right. Return them on the device of the rank's tensor.",
        )


def _within(calls: CollectiveCalls, most: int, largest: int, given: str, hint: str) -> None:
    """Raise Wrong if there's no collective, more than ``most``, or one that's too large."""
    if 0 < len(calls) <= most and all(size <= largest for _, size in calls):
        return
    spent = ", ".join(f"{name}, with {size} elements from the rank" for name, size in calls)
    raise Wrong(
        yours=spent or "no collective",
        expected=f"at most {most}, with at most {largest} elements from a rank",
        given=given,
        hint=f"The result is right, but over budget. {hint}",
    )


@exercise("99.9", "Clip what is sharded")
def clip_sharded(answer: Callable[..., Any]) -> dict[str, Any]:
    for ranks, factor in ((2, 0.5), (3, 2.0)):
        everyone = [torch.randn(4), torch.randn(2, 3)]
        parts = [[torch.randn(3, 2), torch.randn(5)] for _ in range(ranks)]
        whole = [*everyone, *(gradient for of_rank in parts for gradient in of_rank)]
        norm = torch.stack([gradient.square().sum() for gradient in whole]).sum().sqrt()
        limit = factor * norm.item()
        given = f"{ranks} ranks, a norm of {norm:.4f}, at most {limit:.4f}"
        results = on_ranks(_on_gpu, ranks, _clipped, answer, parts, everyone, limit, given=given)
        scale = min(1.0, factor)
        for rank, ((yours, sharded, replicated), calls) in enumerate(results):
            where = f"{given}; on rank {rank}"
            hint = _hint_for_norm(yours, parts, everyone, rank)
            expect_close(_number(yours, where), norm, given=where, hint=hint)
            for name, found, before in (
                ("sharded", sharded, parts[rank]),
                ("replicated", replicated, everyone),
            ):
                for mine, gradient in zip(found, before, strict=True):
                    expect_close(
                        mine,
                        gradient * scale,
                        given=f"a {name} gradient; {where}",
                        hint="Scale every gradient in place, and never make it larger.",
                        rtol=1e-4,
                        atol=1e-5,
                    )
            _within(calls, 1, 1, where, "Sum one number across ranks.")
    return {"norms": "the full gradient's, on 2 and 3 ranks", "sent": "one number"}


def _clipped(
    rank: int,
    world_size: int,
    answer: Callable[..., Any],
    parts: list[list[torch.Tensor]],
    everyone: list[torch.Tensor],
    limit: float,
) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    sharded = [gradient.to(own_gpu()) for gradient in parts[rank]]
    replicated = [gradient.to(own_gpu()) for gradient in everyone]
    return answer(sharded, replicated, limit), sharded, replicated


def _number(yours: Any, where: str) -> torch.Tensor:
    if isinstance(yours, torch.Tensor) and yours.numel() == 1:
        return yours.reshape(()).float()
    if isinstance(yours, int | float) and not isinstance(yours, bool):
        return torch.tensor(float(yours))
    raise Wrong(
        yours=yours,
        expected="the norm before clipping, one number",
        given=where,
        hint="Return it on every rank.",
    )


def _hint_for_norm(
    yours: Any, parts: list[list[torch.Tensor]], everyone: list[torch.Tensor], rank: int
) -> str:
    def squares(gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum()

    def near(other: torch.Tensor) -> bool:
        return abs(float(yours) - other.item()) < 1e-3 * other.item()

    common = squares(everyone)
    shards = torch.stack([squares(of_rank) for of_rank in parts])
    if not isinstance(yours, torch.Tensor | int | float):
        return ""
    if near((shards.sum() + len(parts) * common).sqrt()):
        return "Each rank has the same replicated gradients: count them once, not once per rank."
    if near((shards[rank] + common).sqrt()):
        return "This is the norm of what one rank has. The others have the rest of the gradient."
    if near((shards + common).sqrt().sum()) or near(shards.sqrt().sum() + common.sqrt()):
        return "Norms don't add up; their squares do."
    return "The square of the norm is the sum of the squares of all elements."


@exercise("99.10", "The likeliest token")
def likeliest(answer: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    for ranks, tokens, words in ((2, 5, 1500), (3, 4, 1000)):
        expected = torch.randint(ranks * words, (tokens,))
        # The index of a word in a later rank's part, which neither 16-bit float can represent.
        expected[0] = random.randrange(2049, ranks * words, 2)
        logits = -torch.randint(100, (tokens, ranks * words)).bfloat16()
        logits[torch.arange(tokens), expected] = 50
        parts = [part.contiguous() for part in logits.chunk(ranks, dim=-1)]
        given = (
            f"{tokens} tokens, {ranks} ranks, each with {words} entries of the vocabulary, bfloat16"
        )
        results = on_ranks(_on_gpu, ranks, _found, answer, parts, given=given)
        for rank, ((yours, place), calls) in enumerate(results):
            where = f"{given}; on rank {rank}"
            hint = "Return a word's index for each token, as an integer tensor."
            if isinstance(yours, torch.Tensor) and yours.shape == expected.shape:
                hint = _hint_for_words(yours, expected, words)
                if yours.dtype in _INTEGERS:
                    yours = yours.long()
            expect_equal(yours, expected, given=where, hint=hint)
            _on_its_gpu(place, where)
            _within(calls, 2, 2 * tokens, where, "Two numbers per token and rank are enough.")
    return {"sent": " and ".join(f"{name} with {size} elements per rank" for name, size in calls)}


_INTEGERS = (torch.int16, torch.int32, torch.int64)


def _hint_for_words(yours: torch.Tensor, expected: torch.Tensor, words: int) -> str:
    if torch.equal(yours.double(), expected.double()):
        return "The indices are right. Return them as integers."
    if torch.equal(yours % words, expected % words):
        return (
            "The indices are right within each rank's part. A rank's words start at rank times the "
            "size of a part."
        )
    if ((yours - expected).abs() <= expected / 100).all():
        return "Close: 16-bit floats have 8 or 11 bits for an integer, too few for a word's index."
    return "First find each rank's largest logit and its index, then the largest of those."


def _found(
    rank: int, world_size: int, answer: Callable[..., Any], parts: list[torch.Tensor]
) -> tuple[Any, str]:
    yours = answer(parts[rank].to(own_gpu()))
    return yours, _place(yours)
