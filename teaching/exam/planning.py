"""Checks for the exam's planning tasks: who sees which sample, who waits, what fits."""

import math
import random
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from helpers import devices
from helpers.checks.core import Wrong, exercise, for_input
from vgpu.plan import schedules
from vgpu.profiling import memory
from vgpu.units import format_bytes


@exercise("99.6", "Continue with other ranks")
def remaining(answer: Callable[..., list[list[int]]]) -> dict[str, Any]:
    for samples, done, ranks, batch_size in ((24, 8, 2, 4), (37, 12, 3, 4), (50, 0, 4, 5)):
        order = random.sample(range(1000), samples)
        given = f"{samples} samples, {done} done, {ranks} ranks with batches of {batch_size}"
        with for_input(given, "A rank's batches are lists of indices from `order`."):
            batches = [answer(list(order), done, r, ranks, batch_size) for r in range(ranks)]
            _same_number(batches)
            together = ranks * batch_size
            for step, start in enumerate(range(done, samples, together)):
                parts = [of_rank[step] for of_rank in batches if step < len(of_rank)]
                _judge_step(parts, order[start : start + together], f"step {step} of {given}")
            if len(batches[0]) != step + 1:
                raise Wrong(yours=f"{len(batches[0])} batches", expected=f"{step + 1}, and no more")
    return {
        "each of the samples": "seen once, on 2, 3 and 4 ranks, with equally many steps on each"
    }


def _same_number(batches: list[list[list[int]]]) -> None:
    counts = [len(of_rank) for of_rank in batches]
    if len(set(counts)) > 1:
        raise Wrong(
            yours=f"{counts} batches on the ranks",
            expected="the same number on each rank",
            hint="A rank without a batch wouldn't call the next all-reduce.",
        )


def _judge_step(parts: list[list[int]], expected: list[int], given: str) -> None:
    seen = [index for part in parts for index in part]
    if sorted(seen) != sorted(expected):
        raise Wrong(
            yours=f"together, the ranks see {sorted(seen)}",
            expected=f"the next ones in order, {sorted(expected)}",
            given=given,
            hint="After each step, the ranks must have seen the first samples in the order.",
        )
    sizes = [len(part) for part in parts]
    if max(sizes) - min(sizes) > 1:
        raise Wrong(
            yours=f"batches of {sizes}",
            expected="sizes that differ by at most one",
            given=given,
            hint="Spread the last few samples across all ranks.",
        )


@exercise("99.7", "Simulate a schedule")
def makespan(answer: Callable[..., float | None]) -> dict[str, Any]:
    played = schedules.all_forward_all_backward, schedules.one_forward_one_backward
    kinds: tuple[Any, ...] = (*played, *_STUCK)
    for make in kinds:
        stages, micro_batches = random.randint(2, 4), random.randint(3, 6)
        forward_s, backward_s = random.randint(1, 5), random.randint(2, 9)
        if isinstance(make, str):
            orders = _STUCK[make]
            expected: float | None = None
        else:
            schedule = make(stages, micro_batches)
            orders = [[(a.kind, a.micro_batch) for a in row] for row in schedule.rows]
            half = backward_s / 2
            times = schedules.Times(forward_s, input_gradient=half, weight_gradient=half)
            expected = schedules.simulate(schedule, times).makespan
        given = f"forward {forward_s} s, backward {backward_s} s, orders {orders}"
        with for_input(
            given, "Start each action as soon as its GPU is free and its inputs are available."
        ):
            yours = answer([list(row) for row in orders], forward_s, backward_s)
            if isinstance(make, str) and yours is not None:
                hint = f"{make} Return None if no GPU can continue."
                raise Wrong(yours=yours, expected="None", hint=hint)
            if expected is None:
                continue
            if not isinstance(yours, Real):
                raise Wrong(yours=yours, expected=f"{expected} s")
            if not math.isclose(yours, expected):
                hint = (
                    "A backward needs the next stage's backward; a forward, the previous stage's."
                )
                if yours > expected:
                    hint = (
                        "GPUs work in parallel, and each action starts as soon as it can. The step "
                        "ends when the last GPU is done."
                    )
                raise Wrong(yours=f"{yours} s", expected=f"{expected} s", hint=hint)
    return {"simulated": "all forward, all backward; 1F1B; and two that get stuck"}


# Orders that get stuck, with the reasons as keys.
_STUCK = {
    "Here, each GPU waits for the other.": [
        [("F", 0), ("B", 0), ("F", 1), ("B", 1)],
        [("F", 1), ("B", 1), ("F", 0), ("B", 0)],
    ],
    "Here, a backward comes before its own forward.": [[("B", 0), ("F", 0)]],
}


MOST_SAMPLES = 20_000
"""The most samples that ``peak`` accepts, as the task says; more take too much memory and time."""


@exercise("99.8", "The largest batch")
def largest_batch(answer: Callable[[Callable[[int], int], int], int]) -> dict[str, Any]:
    (gpu,) = devices.lab(1)
    for width in random.sample(range(200, 400, 8), 2):
        step = _step(width, gpu)
        step(2)  # the first step creates Adam's state
        about = random.randint(2500, 4000)
        budget_bytes = step(about) + random.randint(0, 4000)
        asked: list[int] = []

        def peak(batch_size: int, step: Any = step, asked: list[int] = asked) -> int:
            asked.append(batch_size)
            if batch_size > MOST_SAMPLES:
                raise Wrong(
                    yours=f"peak({batch_size:,})",
                    expected=f"at most {MOST_SAMPLES:,} samples, as the task says",
                    hint="Two points determine a line even if they're close together.",
                )
            return step(batch_size)

        given = f"width {width}, a budget of {format_bytes(budget_bytes)}"
        with for_input(given, "Return a number of samples."):
            yours = answer(peak, budget_bytes)
            if isinstance(yours, bool) or not isinstance(yours, int):
                raise Wrong(yours=yours, expected="an integer, the number of samples")
            if len(asked) > 3:
                raise Wrong(
                    yours=f"{len(asked)} steps measured, with {asked} samples",
                    expected="at most 3",
                    hint="Two points determine a line.",
                )
            if yours > MOST_SAMPLES:
                raise Wrong(
                    yours=f"{yours:,} samples",
                    expected=f"fewer than {MOST_SAMPLES:,}",
                    hint=_hint_for_batch(asked),
                )
            held = step(yours) if yours > 0 else 0
            _judge_batch(yours, held, step, budget_bytes, asked)
    return {"your batch": f"{yours} samples", "measured": f"with {asked} samples"}


def _step(width: int, gpu: torch.device) -> Callable[[int], int]:
    """Return a function that trains a new network for one step and returns the peak bytes.

    The peak includes the network and its optimizer's state.
    """
    layers = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).to(gpu)
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch_size: int) -> int:
        def train() -> None:
            x = torch.zeros(batch_size, 64, device=gpu)
            F.cross_entropy(model(x), x[:, 0].long()).backward()
            optimizer.step()
            optimizer.zero_grad()

        (above,) = memory.peaks_during(train, [gpu])
        state = [part for of_one in optimizer.state.values() for part in of_one.values()]
        kept = [*model.parameters(), *state]
        return above + sum(tensor.nbytes for tensor in kept if tensor.device == gpu)

    return step


def _hint_for_batch(asked: Sequence[int]) -> str:
    # The counted peak occurs in the update up to some batch size, which is between 190 and 320,
    # depending on the width; from about 450 samples on, each one adds the same bytes.
    small = [size for size in asked if size <= 450]
    if small:
        return (
            f"With {min(small)} samples, the peak occurs in the update or near it, where the batch "
            "size matters little or not at all. Measure where activations dominate."
        )
    return "Some of the bytes are the same for any batch; the rest grow with it."


def _judge_batch(
    yours: int, held: int, step: Callable[[int], int], budget_bytes: int, asked: Sequence[int]
) -> None:
    hint = _hint_for_batch(asked)
    if held > budget_bytes:
        raise Wrong(
            yours=f"{yours} samples, {format_bytes(held)}",
            expected=f"at most {format_bytes(budget_bytes)}",
            hint=hint,
        )
    more = math.ceil(yours * 1.02) + 1
    if step(more) <= budget_bytes:
        raise Wrong(
            yours=f"{yours} samples, {format_bytes(held)}",
            expected=f"the most that fit; {more} samples would fit, too",
            hint=hint,
        )
