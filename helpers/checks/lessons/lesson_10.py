"""Checks for lesson 10: a schedule's order, unequal stages, and logging that doesn't wait."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch

import vgpu
from helpers.checks.core import Wrong, exercise, expect_close, for_input
from vgpu import Timeline
from vgpu.plan.schedules import (
    DeadlockError,
    Schedule,
    Times,
    from_text,
    one_forward_one_backward,
    peaks_in_flight,
    simulate,
)
from vgpu.units import format_seconds

_STAGES = 4


@exercise("10.1", "A 1F1B order for four stages")
def one_forward_order(answer: Callable[[int, int], Sequence[str]]) -> dict[str, str]:
    shown = {}
    # The smallest sizes, some medium ones, and one at which GPipe has far too many in flight.
    for micro_batches in (8, 1, 3, 4, random.randint(5, 20), 100):
        given = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
        with for_input(given, 'Return a list such as ["F0", "F1", "B0", "B1"] for each stage.'):
            rows = [answer(stage, micro_batches) for stage in range(_STAGES)]
            shown[given] = _judge_order(_rows_as_schedule(rows, micro_batches), micro_batches)
    return shown


def _judge_order(schedule: Schedule, micro_batches: int) -> str:
    """Describe a schedule's time and memory; raise Wrong if it deadlocks or needs too much."""
    drawn = str(schedule)
    try:
        simulated = simulate(schedule)
    except DeadlockError as error:
        raise Wrong(
            yours=drawn,
            expected="four rows without a circular wait",
            hint=f"{error}. How many forwards must a stage run before its first backward?",
        ) from error
    budget = [min(_STAGES - stage, micro_batches) for stage in range(_STAGES)]
    peaks = peaks_in_flight(schedule)
    if any(peak > most for peak, most in zip(peaks, budget, strict=True)):
        raise Wrong(
            yours=f"{peaks} in flight, by device\n{drawn}",
            expected=f"at most {budget}",
            hint="Too many micro-batches in flight: run a backward after each forward as soon as possible.",
        )
    longest = 3 * (micro_batches + _STAGES - 1)
    if simulated.makespan > longest:
        raise Wrong(
            yours=f"{simulated.makespan:g} units of time\n{drawn}",
            expected=f"at most {longest} units, which is what GPipe takes",
            hint="It fits in memory, but devices wait: the first stages can run more forwards early on.",
        )
    return (
        f"{simulated.makespan:g} units, {simulated.bubble:.0%} bubble, in flight {peaks}"
        f" (GPipe: {longest} units, {micro_batches} in flight everywhere)"
    )


def _rows_as_schedule(rows: Any, micro_batches: int) -> Schedule:
    """Return the rows as a schedule with ``micro_batches`` micro-batches and one stage per row."""
    try:
        schedule = from_text(rows)
    except (TypeError, ValueError) as error:
        raise Wrong(
            yours=repr(rows),
            expected='a list such as ["F0", "F1", "B0", "B1"] for each stage',
            hint=f"These rows aren't a schedule: {error}.",
        ) from error
    kinds = {action.kind for action in schedule.actions}
    if schedule.micro_batches != micro_batches or schedule.chunks != 1 or kinds != {"F", "B"}:
        raise Wrong(
            yours=str(schedule),
            expected=f"F0 to F{micro_batches - 1} and B0 to B{micro_batches - 1} in each row",
            hint="Each stage runs each micro-batch forward once and backward once, and nothing else.",
        )
    return schedule


@exercise("10.2", "Balance the stages")
def layers_per_stage(answer: Callable[[list[float], int], Sequence[int]]) -> dict[str, str]:
    shown = {}
    for layer_times, devices in _unequal_networks():
        given = f"layers of {layer_times} units, {devices} devices"
        with for_input(given, "Return how many layers each stage has, in order."):
            yours = answer(list(layer_times), devices)
            counts = list(yours) if isinstance(yours, list | tuple) else []
            whole = all(type(count) is int and count >= 1 for count in counts)
            if not whole or len(counts) != devices or sum(counts) != len(layer_times):
                raise Wrong(
                    yours=repr(yours),
                    expected=f"{devices} integers of at least 1 that add up to {len(layer_times)}",
                )
            best, taken = _shortest_step(layer_times, devices), _step(layer_times, counts)
            if taken > 1.05 * best:
                stages = [round(each, 6) for each in _stage_times(layer_times, counts)]
                raise Wrong(
                    yours=f"stages of {stages} units, a step of {taken:g}",
                    expected=f"a step of at most {1.05 * best:g} units",
                    hint=f"All stages run at the pace of the longest, which takes {max(stages):g} "
                    "units here. Other cuts make it shorter.",
                )
        even = len(layer_times) // devices
        equal = [*[even] * (devices - 1), len(layer_times) - even * (devices - 1)]
        shown = {
            "your step": f"{taken:g} units",
            "budget": f"{1.05 * best:g} units",
            "the same number of layers in each stage": f"{_step(layer_times, equal):g} units",
        }
    return shown


_PACE_MICRO_BATCHES = 64


def _stage_times(layer_times: Sequence[float], counts: Sequence[int]) -> list[float]:
    ends = [0, *accumulate(counts)]
    return [sum(layer_times[begin:end]) for begin, end in pairwise(ends)]


def _step(layer_times: Sequence[float], counts: Sequence[int]) -> float:
    """Return a 1F1B step's time, in units; a layer's forward takes a third of the layer's time."""
    times = Times(1 / 3, 1 / 3, 1 / 3, by_stage=_stage_times(layer_times, counts))
    return simulate(one_forward_one_backward(len(counts), _PACE_MICRO_BATCHES), times).makespan


def _shortest_step(layer_times: Sequence[float], devices: int) -> float:
    """Return how long a step takes if its longest stage is as short as possible.

    That's within p / m of the optimum.
    """

    def counts(cuts: Sequence[int]) -> list[int]:
        return [b - a for a, b in pairwise([0, *cuts, len(layer_times)])]

    places = combinations(range(1, len(layer_times)), devices - 1)
    best = min(places, key=lambda cuts: max(_stage_times(layer_times, counts(cuts))))
    return _step(layer_times, counts(best))


def _unequal_networks() -> list[tuple[list[float], int]]:
    """Return networks with a large embedding, with a large loss, and with layers of all sizes."""
    networks = [
        ([5.0] + [1.0] * 10, 4),  # an empty stage wouldn't make the longest one longer
        ([float(random.randint(4, 6))] + [1.0] * random.randint(10, 14), 4),
        ([1.0] * random.randint(10, 14) + [float(random.randint(4, 6))], 3),
    ]
    while len(networks) < 5:
        layer_times = [float(random.choice((1, 2, 4, 7))) for _ in range(random.randint(9, 14))]
        even = len(layer_times) // 4
        equal = [even, even, even, len(layer_times) - 3 * even]
        if _step(layer_times, equal) > 1.1 * _shortest_step(layer_times, 4):
            networks.append((layer_times, 4))
    return networks


@exercise("10.3", "Log without stopping the GPUs")
def all_losses(
    answer: Callable[[Callable[[Any], torch.Tensor], list[Any]], list[float]],
) -> dict[str, str]:
    shown = {}
    for _ in range(2):
        # Large enough that a step takes longer than its launches, so waiting for it costs time.
        count, size = random.randint(4, 7), random.randint(256, 512)
        batches = [torch.randn(size, 512) for _ in range(count)]
        with vgpu.enable(2) as lab:
            here, there = lab.devices
            on_gpu = [batch.to(here) for batch in batches]

            def step(batch: torch.Tensor, there: torch.device = there) -> torch.Tensor:
                return (batch * 2).to(there).square().mean()

            given = f"{count} batches"
            hint = "Return the losses of all batches, in order."
            with for_input(given, hint), vgpu.record() as timeline:
                yours = answer(step, on_gpu)
            with for_input(given, hint):
                _expect_numbers(yours, count)
                expected = [(batch * 2).square().mean().item() for batch in batches]
                expect_close(yours, expected, rtol=1e-4, atol=1e-6)
                _expect_one_wait(timeline)
            with vgpu.record() as waiting:
                for batch in on_gpu:
                    step(batch).item()
            shown[given] = (
                f"1 wait: {format_seconds(timeline.makespan_s)}; a wait in each step: "
                f"{format_seconds(waiting.makespan_s)} (virtual time)"
            )
    return shown


def _expect_numbers(yours: Any, count: int) -> None:
    numbers = isinstance(yours, list) and all(isinstance(loss, float) for loss in yours)
    if not numbers or len(yours) != count:
        raise Wrong(
            yours=repr(yours),
            expected=f"a list of {count} Python floats",
            hint="Read the values once, after the last step.",
        )


def _expect_one_wait(timeline: Timeline) -> None:
    waits = [event for event in timeline.events if event.kind == "wait"]
    launched_s = max(e.launch_s for e in timeline.events if e.name == "mean")
    early = [wait for wait in waits if wait.start_s < launched_s]
    if early or len(waits) > 1:
        hint = "Each .item() waits: combine all losses into one tensor first."
        if early:
            hint = "Python waited before it had launched the last step: no .item() in the loop."
        raise Wrong(
            yours=f"{len(waits)} waits",
            expected="one wait, after the last step",
            hint=hint,
        )
