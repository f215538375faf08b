"""A schedule played in units of time: who waits for whom, the bubble, and what is kept meanwhile.

Left out: the host's launches, and copies that hold up the computation on either side. A recording
of the schedule's execution on virtual GPUs has both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vgpu.plan.schedules.orders import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
)


class DeadlockError(ValueError):
    """The rows of a schedule wait for each other; the message names who waits for what."""


@dataclass(frozen=True)
class Times:
    """How long one micro-batch takes in all layers of one device, in any unit.

    If a device has v chunks, each takes 1 / v of it. A whole backward is both halves.
    transfer: from the end of an action until a neighbour on another device can use its result.
    by_stage: how many times as long each stage takes, in both directions; empty means all alike.
    """

    forward: float = 1
    input_gradient: float = 1
    weight_gradient: float = 1
    transfer: float = 0
    by_stage: Sequence[float] = ()

    def of(self, action: Action, chunks: int) -> float:
        """The time of one action, in one of ``chunks`` chunks."""
        times_as_long = self.by_stage[action.stage] if self.by_stage else 1
        return self._of_kinds(chunks)[action.kind] * times_as_long

    def end(self, action: Action, chunks: int, start: float) -> float:
        """When an action ends that begins at ``start``; asked once, in the order of each device."""
        return start + self.of(action, chunks)

    def _of_kinds(self, chunks: int) -> dict[str, float]:
        return {
            FORWARD: self.forward / chunks,
            BACKWARD: (self.input_gradient + self.weight_gradient) / chunks,
            INPUT_GRADIENT: self.input_gradient / chunks,
            WEIGHT_GRADIENT: self.weight_gradient / chunks,
        }


class Box(NamedTuple):
    """One action, when it began and when it ended."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Play:
    """A schedule in time: the boxes of each device, in order."""

    schedule: Schedule
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def makespan(self) -> float:
        return max(row[-1].end for row in self.boxes)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they do nothing, from 0 to 1."""
        busy = sum(box.end - box.start for row in self.boxes for box in row)
        return 1 - busy / (self.schedule.devices * self.makespan)

    def order(self) -> list[Action]:
        """All actions by their start: an order in which one host can run them."""
        boxes = [box for row in self.boxes for box in row]
        return [box.action for box in sorted(boxes, key=lambda box: box.start)]


def play(schedule: Schedule, times: Times | None = None) -> Play:
    """Let every device take its actions in order, each as soon as what it needs is there.

    Raises DeadlockError if devices wait for each other, and ValueError if ``times`` are of another
    number of stages.
    """
    times = times or Times()
    if times.by_stage and len(times.by_stage) != schedule.stages:
        raise ValueError(
            f"{schedule.name} has {schedule.stages} stages; by_stage has {len(times.by_stage)}"
        )
    ended: dict[Action, float] = {}
    rows: list[list[Box]] = [[] for _ in schedule.rows]
    waiting: dict[Action, list[int]] = {}  # which devices go on when an action has ended
    free = list(range(schedule.devices))
    while free:
        device = free.pop()
        done, row = rows[device], schedule.rows[device]
        while len(done) < len(row):
            action = row[len(done)]
            needed = list(needs(action, schedule))
            missing = next((need for need in needed if need not in ended), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(device)
                break
            start = done[-1].end if done else 0.0
            for need in needed:
                sent = schedule.device_of(need.stage) != device
                start = max(start, ended[need] + (times.transfer if sent else 0))
            ended[action] = times.end(action, schedule.chunks, start)
            done.append(Box(action, start, ended[action]))
            free += waiting.pop(action, ())
    if any(len(done) < len(row) for done, row in zip(rows, schedule.rows, strict=True)):
        raise DeadlockError(_deadlock(schedule, [len(done) for done in rows], set(ended)))
    return Play(schedule, tuple(tuple(row) for row in rows))


def needs(action: Action, schedule: Schedule) -> Iterator[Action]:
    """The actions whose results an action uses."""
    kind, micro_batch, stage = action
    if kind == FORWARD:
        if stage > 0:
            yield Action(FORWARD, micro_batch, stage - 1)
    elif kind == WEIGHT_GRADIENT:
        yield Action(INPUT_GRADIENT, micro_batch, stage)
    else:
        yield Action(FORWARD, micro_batch, stage)
        if stage + 1 < schedule.stages:
            # The stage behind may take its backward whole or in halves.
            whole = Action(BACKWARD, micro_batch, stage + 1)
            half = Action(INPUT_GRADIENT, micro_batch, stage + 1)
            yield whole if whole in schedule.actions else half


def in_flight(schedule: Schedule) -> list[list[int]]:
    """For each device, how many activations it keeps after each of its actions.

    One activation is one micro-batch in one stage, kept from its forward until its backward, or the
    gradients of its weights, are done.
    """
    counts = []
    for row in schedule.rows:
        kept, after = 0, []
        for action in row:
            if action.kind == FORWARD:
                kept += 1
            elif action.kind in (BACKWARD, WEIGHT_GRADIENT):
                kept -= 1
            after.append(kept)
        counts.append(after)
    return counts


def peaks_in_flight(schedule: Schedule) -> list[int]:
    """The most activations that each device keeps at once."""
    return [max(after) for after in in_flight(schedule)]


def _deadlock(schedule: Schedule, positions: list[int], ended: set[Action]) -> str:
    """Who waits for whom, from a device in the circle until it comes again."""
    waits = {}
    for device, (position, row) in enumerate(zip(positions, schedule.rows, strict=True)):
        if position < len(row):
            missing = next(need for need in needs(row[position], schedule) if need not in ended)
            waits[device] = (row[position], missing)
    device, seen = min(waits), []
    while device not in seen:
        seen.append(device)
        device = schedule.device_of(waits[device][1].stage)
    circle = seen[seen.index(device) :]
    return f"the schedule {schedule.name!r} never ends: " + "; ".join(
        _wait(schedule, at, *waits[at]) for at in circle
    )


def _wait(schedule: Schedule, device: int, action: Action, missing: Action) -> str:
    other = schedule.device_of(missing.stage)
    whose = "its own row" if other == device else f"the row of device {other}"
    return (
        f"device {device} is at {schedule.text(action)} and waits for {schedule.text(missing)}, "
        f"which comes later in {whose}"
    )
