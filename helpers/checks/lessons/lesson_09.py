"""Checks of lesson 09: split sizes, an order of a schedule, streams, a log that does not wait."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from helpers import vgpu
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal
from helpers.schedules import DeadlockError, Schedule, from_text, peaks_in_flight, play
from helpers.units import format_seconds
from helpers.vgpu import Timeline

_MOST_RECORDINGS = 12
_STAGES = 4


class Machine(NamedTuple):
    """Two GPUs with a link, a network of four linear layers, and the images of a batch."""

    gpu: str
    link: str
    width: int
    batch_size: int


def _seconds(machine: Machine, split_size: int) -> float:
    """Virtual time of one batch in pieces, forward and backward."""
    with vgpu.enable(2, gpu=machine.gpu, link=machine.link) as lab, vgpu.shapes_only():
        first, second = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(gpu)
            for width, gpu in zip((machine.width, machine.width), lab.devices, strict=True)
        )
        batch = torch.randn(machine.batch_size, 64, machine.width, device=lab.devices[0])
        with vgpu.record() as timeline:
            pieces = [second(first(p).to(lab.devices[1])) for p in batch.split(split_size)]
            torch.cat(pieces).sum().backward()
    return timeline.makespan_s


def _machines() -> list[Machine]:
    """Machines whose best sizes lie far apart: no one size is good on all."""
    return [
        Machine("K80", "PCIe 3", random.choice((2048, 3072)), random.randint(90, 120)),
        Machine("H100", "NVLink 4", random.choice((128, 256)), random.randint(90, 120)),
        Machine("V100", "NVLink 2", random.choice((512, 768, 1024)), random.randint(60, 120)),
    ]


def _stopwatch(machine: Machine) -> tuple[Callable[[int], float], list[int], dict[int, float]]:
    """The ``time_of`` of one machine, the sizes it is asked for, and the seconds of each size."""
    asked: list[int] = []
    times_s: dict[int, float] = {}

    def time_of(size: int) -> float:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a split size is a whole number from 1, got {size!r}")
        asked.append(size)
        if size not in times_s:
            times_s[size] = _seconds(machine, size)
        return times_s[size]

    return time_of, asked, times_s


@exercise("9.1", "The best split size for another GPU")
def best_split_size(answer: Callable[[Callable[[int], float], int], int]) -> None:
    answer(lambda size: float(size), 4)  # an untouched stub says so here
    for machine in _machines():
        batch_size = machine.batch_size
        time_of, asked, times_s = _stopwatch(machine)
        yours = answer(time_of, batch_size)
        given = f"a batch of {batch_size} on two {machine.gpu}s"
        if isinstance(yours, bool) or not isinstance(yours, int) or not 1 <= yours <= batch_size:
            raise Wrong(
                yours=yours,
                expected=f"a whole number from 1 to {batch_size}",
                given=given,
                hint="Return the size, not its time.",
            )
        if len(asked) > _MOST_RECORDINGS:
            raise Wrong(
                yours=f"{len(asked)} recordings",
                expected=f"at most {_MOST_RECORDINGS}",
                given=given,
                hint="The curve is flat around its best: try sizes that differ by a factor.",
            )
        # For each number of pieces the smallest size that needs no more of them.
        for count in range(1, batch_size + 1):
            time_of(-(-batch_size // count))
        time_of(yours)
        best = min(times_s, key=lambda size: times_s[size])
        if times_s[yours] > 1.05 * times_s[best]:
            kind = "smaller" if best < yours else "larger"
            raise Wrong(
                yours=f"pieces of {yours}: {format_seconds(times_s[yours])}",
                expected=f"at most {format_seconds(1.05 * times_s[best])}",
                given=given,
                hint=f"The best size here is {kind}. It depends on the GPU: ask time_of.",
            )


@exercise("9.2", "A 1F1B order for four stages")
def one_forward_order(answer: Callable[[int, int], Sequence[str]]) -> None:
    # The sizes at the edges, some in between, and one at which GPipe would fill every memory.
    for micro_batches in (8, 1, 3, 4, random.randint(5, 20), 100):
        rows = [answer(stage, micro_batches) for stage in range(_STAGES)]
        given = f"{micro_batches} micro-batches"
        schedule = _rows_as_schedule(rows, micro_batches, given)
        told = str(schedule)
        try:
            played = play(schedule)
        except DeadlockError as error:
            raise Wrong(
                yours=told,
                expected="four rows that do not wait for each other in a circle",
                given=given,
                hint=f"{error}. How many forwards must a stage take before its first backward?",
            ) from error
        budget = [min(_STAGES - stage, micro_batches) for stage in range(_STAGES)]
        peaks = peaks_in_flight(schedule)
        if any(peak > most for peak, most in zip(peaks, budget, strict=True)):
            raise Wrong(
                yours=f"{peaks} in flight, device by device\n{told}",
                expected=f"at most {budget}",
                given=given,
                hint="Too many in flight: let a backward follow each forward as soon as it can.",
            )
        longest = 3 * (micro_batches + _STAGES - 1)
        if played.makespan > longest:
            raise Wrong(
                yours=f"{played.makespan:g} units of time\n{told}",
                expected=f"at most {longest}, as GPipe takes",
                given=given,
                hint="It fits, but devices wait: the first ones can take more forwards at first.",
            )


def _rows_as_schedule(rows: Any, micro_batches: int, given: str) -> Schedule:
    """The rows, as a schedule of just so many micro-batches, whole on each device."""
    try:
        schedule = from_text(rows)
    except (TypeError, ValueError) as error:
        raise Wrong(
            yours=rows,
            expected='for each stage a list such as ["F0", "F1", "B0", "B1"]',
            given=given,
            hint=f"These rows are no schedule: {error}.",
        ) from error
    kinds = {action.kind for action in schedule.actions}
    if schedule.micro_batches != micro_batches or schedule.chunks != 1 or kinds != {"F", "B"}:
        raise Wrong(
            yours=str(schedule),
            expected=f"F0 to F{micro_batches - 1} and B0 to B{micro_batches - 1} in each row",
            given=given,
            hint="Each stage takes each micro-batch forward and backward, whole, and no others.",
        )
    return schedule


def _products(batches: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """The products as in the solution: two buffers, two waits."""
    gpu = weight.device
    default, side = torch.accelerator.current_stream(gpu), torch.Stream(gpu)
    buffers = [torch.empty_like(batches[0], device=gpu) for _ in range(2)]
    with side:
        buffers[0].copy_(batches[0], non_blocking=True)
    products = []
    for index in range(len(batches)):
        default.wait_stream(side)
        if index + 1 < len(batches):
            side.wait_stream(default)
            with side:
                buffers[(index + 1) % 2].copy_(batches[index + 1], non_blocking=True)
        products.append(buffers[index % 2] @ weight)
    return products


@exercise("9.3", "Find the missing synchronisation")
def repaired(
    answer: Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]],
) -> None:
    for _ in range(2):
        count, rows = random.randint(4, 7), random.choice((384, 512, 640))
        batches = [torch.randn(rows, 256) for _ in range(count)]
        weight = torch.randn(256, 1024)
        expected = [batch @ weight for batch in batches]
        with vgpu.enable(1, gpu="K80") as lab:
            pinned = [batch.pin_memory() for batch in batches]
            there = weight.to(lab.devices[0])
            with vgpu.record() as ours:
                _products(pinned, there)
            with vgpu.record() as timeline:
                found = answer(pinned, there)
            given = f"{count} batches of {rows} x 256"
            _judge_products(found, expected, timeline, given)
            if timeline.makespan_s > 1.1 * ours.makespan_s:
                raise Wrong(
                    yours=f"no race, {format_seconds(timeline.makespan_s)}",
                    expected=f"at most {format_seconds(1.1 * ours.makespan_s)}",
                    given=given,
                    hint="Right, but copies and products take turns. Wait as early in the loop, "
                    "and for as little, as you can; let Python wait for nothing.",
                )


def _judge_products(
    found: Any, expected: list[torch.Tensor], timeline: Timeline, given: str
) -> None:
    if not isinstance(found, list) or not all(isinstance(p, torch.Tensor) for p in found):
        hint = "Return the list of products."
        raise Wrong(yours=found, expected="a list of tensors", given=given, hint=hint)
    if timeline.races:
        late = timeline.races[0].operation == "copy_" or timeline.races[0].operation == "copy"
        raise Wrong(
            yours=f"{len(timeline.races)} races; {timeline.races[0]}",
            expected="no race",
            given=given,
            hint="A copy writes into a buffer that a product may still read."
            if late
            else "A product reads a buffer before its copy has arrived.",
        )
    expect_equal(len(found), len(expected), given=given, hint="One product for each batch.")
    for yours, right in zip(found, expected, strict=True):
        hint = "The products are wrong, though nothing races: which buffer is read?"
        expect_close(yours.cpu(), right, given=given, hint=hint, rtol=1e-3, atol=1e-3)


@exercise("9.4", "A log that does not stop the GPUs")
def all_losses(answer: Callable[[Callable[[Any], torch.Tensor], list[Any]], list[float]]) -> None:
    for _ in range(2):
        count, size = random.randint(4, 7), random.randint(64, 128)
        batches = [torch.randn(size, 8) for _ in range(count)]
        with vgpu.enable(2) as lab:
            here, there = lab.devices
            on_gpu = [batch.to(here) for batch in batches]

            def step(batch: torch.Tensor, there: torch.device = there) -> torch.Tensor:
                return (batch * 2).to(there).square().mean()

            with vgpu.record() as timeline:
                yours = answer(step, on_gpu)
            _expect_numbers(yours, count)
            expected = [(batch * 2).square().mean().item() for batch in batches]
            expect_close(yours, expected, given=f"{count} batches", rtol=1e-4, atol=1e-6)
            _expect_one_wait(timeline, count)


def _expect_numbers(yours: Any, count: int) -> None:
    numbers = isinstance(yours, list) and all(isinstance(loss, float) for loss in yours)
    if not numbers or len(yours) != count:
        raise Wrong(
            yours=yours,
            expected=f"a list of {count} Python numbers",
            hint="Ask for the numbers once, after the last step.",
        )


def _expect_one_wait(timeline: Timeline, count: int) -> None:
    waits = [event for event in timeline.events if event.kind == "wait"]
    launched_s = max(e.launch_s for e in timeline.events if e.name == "mean")
    early = [wait for wait in waits if wait.start_s < launched_s]
    if early or len(waits) > 1:
        hint = "Each .item() is a wait of its own: make one tensor of all losses first."
        if early:
            hint = "Python waited before it had handed over the last step: no .item() in the loop."
        raise Wrong(
            yours=f"{len(waits)} waits",
            expected="one wait, after the last step",
            given=f"{count} batches",
            hint=hint,
        )
