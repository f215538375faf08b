"""Checks for the exam's last tasks: a trace, low-precision gradients, and many users' cache."""

import random
from collections.abc import Callable
from typing import Any

import torch

from helpers.checks.core import Wrong, exercise, expect_close, for_input

Row = dict[str, Any]
Compress = Callable[[torch.Tensor], torch.Tensor]


@exercise("99.11", "Who waits how long")
def waits_us(answer: Callable[[list[Row]], list[float]]) -> dict[str, Any]:
    for ranks, collectives in ((2, 1), (3, 4), (4, 7)):
        starts, rows = _trace(ranks, collectives)
        given = f"{ranks} ranks, whose collectives start at {starts} µs"
        with for_input(given, "Return a list of numbers, one for each rank."):
            yours = [float(wait) for wait in answer([dict(row) for row in rows])]
            last = [max(times) for times in zip(*starts, strict=True)]
            expected = [
                sum(latest - own for latest, own in zip(last, times, strict=True))
                for times in starts
            ]
            late = [
                sum(own - min(times[k] for times in starts) for k, own in enumerate(of_rank))
                for of_rank in starts
            ]
            if yours != expected:
                raise Wrong(
                    yours=f"{yours}",
                    expected=f"{expected}",
                    given=given,
                    hint="This is how late each rank is. The last one doesn't wait."
                    if yours == late
                    else "Rows are in random order, and only kernels count: sort each rank's "
                    "by ts. A wait ends when the last rank has arrived.",
                )
    return {
        "the last test case": f"waits of {yours} µs: the others wait for rank {yours.index(min(yours))}"
    }


def _trace(ranks: int, collectives: int) -> tuple[list[list[float]], list[Row]]:
    """Return when each rank's collectives start, and the trace's rows, shuffled."""
    starts: list[list[float]] = [[] for _ in range(ranks)]
    rows: list[Row] = []
    begin = 0.0
    for number in range(collectives):
        arrived = [begin + delay for delay in random.sample(range(100, 900), ranks)]
        end = max(arrived) + random.randint(20, 60)
        for rank, start in enumerate(arrived):
            starts[rank].append(start)
            name = "ncclDevKernel_" + ("AllReduce" if number % 2 else "ReduceScatter")
            spans = (
                ("kernel", name, start, end - start),
                ("kernel", "mm", start - 30, 30.0),
                ("user_annotation", "nccl:collective", start - 20 * (rank + 1), 5.0),
            )
            for kind, named, at, lasts in spans:
                where = {"ph": "X", "cat": kind, "pid": rank if kind == "kernel" else 1000 + rank}
                rows.append({**where, "tid": 7, "name": named, "ts": at, "dur": lasts})
        begin = end
    random.shuffle(rows)
    return starts, rows


@exercise("99.12", "Send the rest later")
def sent(
    answer: Callable[[list[torch.Tensor], Compress], list[torch.Tensor]],
) -> dict[str, Any]:
    for dtype, steps in ((torch.bfloat16, 3), (torch.float8_e4m3fn, 200)):

        def compress(x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return x.to(dtype)

        mean = torch.rand(16) + 0.5
        gradients = [mean + 0.1 * torch.randn(16) for _ in range(steps)]
        before = [gradient.clone() for gradient in gradients]
        given = f"{steps} gradients, compressed to {dtype}"
        with for_input(given, "Return a list: what's sent in each step."):
            yours = list(answer(gradients, compress))
            if not all(map(torch.equal, gradients, before)):
                raise Wrong(
                    yours="modified gradients",
                    expected="unmodified gradients",
                    given=given,
                    hint="+= writes to the tensor that was passed in.",
                )
            types = {tensor.dtype for tensor in yours}
            if len(yours) != steps or types != {dtype}:
                raise Wrong(
                    yours=f"{len(yours)} tensors of {types}",
                    expected=f"{steps} of {dtype}",
                    given=given,
                    hint="Send what compress returns, once per step.",
                )
            rest = torch.zeros(16)
            for gradient, tensor in zip(before, yours, strict=True):
                whole = gradient + rest
                expect_close(
                    tensor.float(),
                    compress(whole).float(),
                    hint="What a step leaves out is the difference between what should have been "
                    "sent and what was, in float32. The next step adds it, once.",
                )
                rest = whole - compress(whole).float()
    total = sum(before, torch.zeros(16))
    plain = sum((compress(gradient).float() for gradient in before), torch.zeros(16))
    found = sum((tensor.float() for tensor in yours), torch.zeros(16))
    return {
        "the sum of 200 in float8 is off by": f"{_off(found, total):.3%}",
        "without the rest": f"{_off(plain, total):.3%}",
    }


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@exercise("99.13", "Pages that users share")
def pages(answer: Callable[[list[list[int]], int], int]) -> dict[str, Any]:
    system = [random.randint(0, 99) for _ in range(16)]
    own = [100, 101, 102, 103]
    cases = (
        ([system[:5]], 4, "The last tokens need a page, too, even if they don't fill it."),
        ([system[:8]], 4, "Eight tokens fill two pages of four."),
        (
            [system + own, system + own[::-1]],
            4,
            "A full page is shared if the prompts are equal up to its end.",
        ),
        (
            [[*system[:4], *own], [*reversed(own), *own]],
            4,
            "Keys depend on all earlier tokens: equal tokens after different ones need new pages.",
        ),
        (
            [system[:6], system[:6]],
            4,
            "A page that isn't full isn't shared: its user will write to it.",
        ),
        (
            [[*system, k] for k in range(200, 220)],
            8,
            "A full page is shared if the prompts are equal up to its end.",
        ),
    )
    for prompts, size, hint in cases:
        given = f"pages of {size} tokens for {prompts if len(prompts) < 3 else len(prompts)}"
        whole = {tuple(p[:end]) for p in prompts for end in range(size, len(p) + 1, size)}
        expected = len(whole) + sum(len(p) % size > 0 for p in prompts)
        with for_input(given, "Return an integer."):
            yours = answer([list(prompt) for prompt in prompts], size)
            if yours != expected:
                raise Wrong(yours=yours, expected=expected, given=given, hint=hint)
    alone = sum(-(-len(prompt) // size) for prompt in prompts)
    return {"20 users with the same system prompt": f"{yours} pages, instead of {alone}"}
