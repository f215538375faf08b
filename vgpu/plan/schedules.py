"""Pipeline schedules as plain data: for each device, a row of actions, in order.

A network is divided into stages, and the batch into micro-batches. Device d has stage d and, with v
chunks, also stage d + devices, and so on.

Sources: GPipe (Huang et al., 2019), PipeDream-Flush (Narayanan et al., 2021a, "Memory-efficient
pipeline-parallel DNN training"), Megatron-LM (Narayanan et al., 2021b, "Efficient large-scale
language model training on GPU clusters"), zero bubble (Qi et al., 2023, "Zero bubble pipeline
parallelism").
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import NamedTuple

from vgpu.time.costs import check_count

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
_TEXT = re.compile(r"(\d*)([FBIW])(\d+)")


class Action(NamedTuple):
    """One micro-batch in one stage, in one direction.

    ``kind`` is "F" for forward and "B" for backward. If backward is split in two, "I" is for the
    gradient of the stage's input, and "W" for the gradients of its weights.
    """

    kind: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """Format like torch.distributed.pipelining: "2F0" is stage 2's forward of micro-batch 0."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """A row of actions for each device; each device has ``chunks`` stages.

    Raises ValueError unless each stage runs each micro-batch forward once and backward once (in one
    piece or split in two), all in its device's row. Whether the rows fit together is a separate
    question, which ``simulate`` answers.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.devices < 1 or self.chunks < 1 or not any(self.rows):
            raise ValueError(f"{self.name}: needs at least one device, one chunk and one action")
        seen: set[Action] = set()
        for device, row in enumerate(self.rows):
            for action in row:
                self._check(action, device, seen)
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches):
                kinds = "".join(k for k in "FBIW" if Action(k, micro_batch, stage) in seen)
                if kinds not in ("FB", "FIW"):
                    raise ValueError(
                        f"device {self.device_of(stage)}: stage {stage} runs {kinds or 'nothing'} "
                        f"for micro-batch {micro_batch}; expected F and B, or F, I and W, once each"
                    )

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return self.devices * self.chunks

    def device_of(self, stage: int) -> int:
        """Return the device whose row contains the stage."""
        return stage % self.devices

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max(action.micro_batch for row in self.rows for action in row)

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)

    def text(self, action: Action) -> str:
        """Format an action for ``from_text``, without the stage if each device has only one."""
        return str(action) if self.chunks > 1 else f"{action.kind}{action.micro_batch}"

    def __str__(self) -> str:
        lines = [" ".join(map(self.text, row)) for row in self.rows]
        return "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))

    def _check(self, action: Action, device: int, seen: set[Action]) -> None:
        kind, micro_batch, stage = action
        if kind not in tuple("FBIW") or micro_batch < 0 or not 0 <= stage < self.stages:
            raise ValueError(
                f"device {device}: {action} isn't an action: the kind must be F, B, I or W, the "
                f"stage from 0 to {self.stages - 1}, and the micro-batch at least 0"
            )
        if self.device_of(stage) != device:
            raise ValueError(
                f"device {device}: {action} is for stage {stage}, which belongs in the row of "
                f"device {self.device_of(stage)}"
            )
        if action in seen:
            raise ValueError(f"device {device}: {action} appears twice")
        seen.add(action)


def from_text(rows: Sequence[str | Sequence[str]], name: str = "by hand") -> Schedule:
    """Parse a schedule, one string per device: ``from_text(["F0 F1 B0 B1", "F0 B0 F1 B1"])``.

    A row may also be a list of actions. A leading number, as in "4F0", is the stage; without one,
    the stage is the device's index. Raises ValueError if a string isn't an action.
    """
    schedule_rows = []
    for device, row in enumerate(rows):
        actions = []
        for text in row.split() if isinstance(row, str) else row:
            parts = _TEXT.fullmatch(text)
            if parts is None:
                raise ValueError(f"device {device}: {text!r} is not an action such as F0 or B3")
            stage, kind, micro_batch = parts.groups()
            actions.append(Action(kind, int(micro_batch), int(stage) if stage else device))
        schedule_rows.append(tuple(actions))
    last = max((action.stage for row in schedule_rows for action in row), default=0)
    return Schedule(name, tuple(schedule_rows), last // max(len(schedule_rows), 1) + 1)


def all_forward_all_backward(devices: int, micro_batches: int) -> Schedule:
    """GPipe: all micro-batches forward, then all backward.

    The bubble is (p - 1) / (m + p - 1) of the time, for p devices and m micro-batches (GPipe, 2.3).
    Every device keeps the activations of all m micro-batches.
    """
    _check_counts(devices, micro_batches)
    rows = [
        [Action(kind, m, device) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)]
        for device in range(devices)
    ]
    return _schedule("all forward, all backward", rows)


def _in_turn(warm: int, forwards: list[Action], backwards: list[list[Action]]) -> list[Action]:
    """Return ``warm`` forwards, then alternating forwards and backwards, then the rest."""
    row = forwards[:warm]
    for forward, backward in zip_longest(forwards[warm:], backwards):
        if forward is not None:
            row.append(forward)
        row += backward
    return row


def one_forward_one_backward(devices: int, micro_batches: int) -> Schedule:
    """1F1B, as in PipeDream-Flush: after a warm-up, forwards and backwards alternate.

    The bubble is the same as for all forward, all backward: (p - 1) / (m + p - 1) (Megatron-LM,
    2.2.1). Device d keeps the activations of at most min(p - d, m) micro-batches.
    """
    _check_counts(devices, micro_batches)
    rows = []
    for device in range(devices):
        forwards = [Action(FORWARD, m, device) for m in range(micro_batches)]
        backwards = [[Action(BACKWARD, m, device)] for m in range(micro_batches)]
        rows.append(_in_turn(devices - device - 1, forwards, backwards))
    return _schedule("1F1B", rows)


def interleaved(devices: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: v chunks on each device, so a micro-batch visits each device v times.

    The bubble is (p - 1) / (v m + p - 1) of the time; Megatron-LM, 2.2.2, gives it relative to the
    ideal time, as (p - 1) / (v m). Device 0 keeps the activations of at most v p + p - 1 chunks,
    each 1 / v of a device's layers (Korthikanti et al., 2022, 4.2.3). Raises ValueError unless the
    number of micro-batches is a multiple of the number of devices.
    """
    _check_counts(devices, micro_batches, chunks)
    if micro_batches % devices:
        raise ValueError(
            f"interleaving runs micro-batches in rounds of {devices}, one per device, but "
            f"{micro_batches} isn't a multiple of {devices}"
        )
    total = micro_batches * chunks

    def nth(kind: str, n: int, device: int) -> Action:
        """Return a device's n-th forward or backward; rounds take p micro-batches per chunk."""
        around, within = divmod(n, devices * chunks)
        chunk, place = divmod(within, devices)
        if kind == BACKWARD:
            chunk = chunks - 1 - chunk
        return Action(kind, around * devices + place, chunk * devices + device)

    rows = []
    for device in range(devices):
        warm = 2 * (devices - device - 1) + (chunks - 1) * devices
        forwards = [nth(FORWARD, n, device) for n in range(total)]
        backwards = [[nth(BACKWARD, n, device)] for n in range(total)]
        rows.append(_in_turn(warm, forwards, backwards))
    return _schedule(f"interleaved 1F1B, {chunks} chunks", rows, chunks)


def zero_bubble(devices: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with backward split in two; weight gradients are deferred and fill the bubble.

    Nothing waits for weight gradients, so device d defers those of d micro-batches. If the three
    parts take the same time, the bubble is (p - 1) / (3 m + p - 1), a third of 1F1B's idle time (Qi
    et al., 2.3 and table 2). This assumes m >= p. Every device keeps the activations of at most
    min(p, m) micro-batches.
    """
    _check_counts(devices, micro_batches)
    rows = []
    for device in range(devices):
        forwards = [Action(FORWARD, m, device) for m in range(micro_batches)]
        weights = [Action(WEIGHT_GRADIENT, m, device) for m in range(micro_batches)]
        backwards = []
        for m in range(micro_batches):
            gradients = [Action(INPUT_GRADIENT, m, device)]
            if m >= device:
                gradients.append(weights[m - device])
            backwards.append(gradients)
        deferred = weights[max(micro_batches - device, 0) :]
        rows.append(_in_turn(devices - device - 1, forwards, backwards) + deferred)
    return _schedule("zero bubble (ZB-H1)", rows)


KINDS: dict[str, Callable[[int, int], Schedule]] = {
    "all forward, all backward": all_forward_all_backward,
    "1F1B": one_forward_one_backward,
    "interleaved 1F1B, 2 chunks": interleaved,
    "zero bubble (ZB-H1)": zero_bubble,
}
"""This file's schedules by name; each is a function of devices and micro-batches."""


def _schedule(name: str, rows: Sequence[Sequence[Action]], chunks: int = 1) -> Schedule:
    return Schedule(name, tuple(tuple(row) for row in rows), chunks)


def _check_counts(devices: int, micro_batches: int, chunks: int = 1) -> None:
    check_count("devices", devices)
    check_count("micro_batches", micro_batches)
    check_count("chunks", chunks)


# Simulation


class DeadlockError(ValueError):
    """A schedule's rows wait for each other; the message says which device is waiting for what.

    ``at`` maps each device that's stuck to its next action, such as "B0".
    """

    def __init__(self, message: str, at: dict[int, str]) -> None:
        super().__init__(message)
        self.at = at


@dataclass(frozen=True)
class Times:
    """How long one micro-batch takes in all of a device's layers, in any unit.

    If a device has v chunks, each takes 1 / v of that. A full backward takes ``input_gradient +
    weight_gradient``. ``transfer`` is the time from the end of an action until the neighboring
    stage on another device can use its result. ``by_stage`` has a factor for each stage's forward
    and backward; if empty, all stages take the same time.
    """

    forward: float = 1
    input_gradient: float = 1
    weight_gradient: float = 1
    transfer: float = 0
    by_stage: Sequence[float] = ()

    def of(self, action: Action, chunks: int) -> float:
        """Return the time of one action on a device with ``chunks`` chunks."""
        times_as_long = self.by_stage[action.stage] if self.by_stage else 1
        of_kinds = {
            FORWARD: self.forward,
            BACKWARD: self.input_gradient + self.weight_gradient,
            INPUT_GRADIENT: self.input_gradient,
            WEIGHT_GRADIENT: self.weight_gradient,
        }
        return of_kinds[action.kind] / chunks * times_as_long

    def end(self, action: Action, chunks: int, start: float) -> float:
        """Return when an action ends; called once for each action, in each device's order."""
        return start + self.of(action, chunks)


class Box(NamedTuple):
    """One action, with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule with start and end times: each device's boxes, in order."""

    schedule: Schedule
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def makespan(self) -> float:
        return max(row[-1].end for row in self.boxes)

    @property
    def bubble(self) -> float:
        """The idle fraction of all devices' time, from 0 to 1."""
        busy = sum(box.end - box.start for row in self.boxes for box in row)
        return 1 - busy / (self.schedule.devices * self.makespan)

    def order(self) -> list[Action]:
        """Return all actions by start time, an order in which a single host can run them."""
        boxes = [box for row in self.boxes for box in row]
        return [box.action for box in sorted(boxes, key=lambda box: box.start)]


def simulate(schedule: Schedule, times: Times | None = None) -> SimulatedSchedule:
    """Simulate every device running its actions in order, each as soon as its inputs are available.

    Raises DeadlockError if devices wait for each other, and ValueError if ``times`` is for a
    different number of stages.
    """
    times = times or Times()
    if times.by_stage and len(times.by_stage) != schedule.stages:
        raise ValueError(
            f"{schedule.name} has {schedule.stages} stages; by_stage has {len(times.by_stage)}"
        )
    ended: dict[Action, float] = {}
    rows: list[list[Box]] = [[] for _ in schedule.rows]
    waiting: dict[Action, list[int]] = {}  # which devices continue when an action has ended
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
        nexts = zip(rows, schedule.rows, strict=True)
        at = {d: row[len(done)] for d, (done, row) in enumerate(nexts) if len(done) < len(row)}
        message = _deadlock(schedule, [len(done) for done in rows], set(ended))
        raise DeadlockError(message, {d: schedule.text(action) for d, action in at.items()})
    return SimulatedSchedule(schedule, tuple(tuple(row) for row in rows))


def needs(action: Action, schedule: Schedule) -> Iterator[Action]:
    """Yield the actions whose results an action uses."""
    kind, micro_batch, stage = action
    if kind == FORWARD:
        if stage > 0:
            yield Action(FORWARD, micro_batch, stage - 1)
    elif kind == WEIGHT_GRADIENT:
        yield Action(INPUT_GRADIENT, micro_batch, stage)
    else:
        yield Action(FORWARD, micro_batch, stage)
        if stage + 1 < schedule.stages:
            # The next stage's backward may be in one piece or split in two.
            whole = Action(BACKWARD, micro_batch, stage + 1)
            half = Action(INPUT_GRADIENT, micro_batch, stage + 1)
            yield whole if whole in schedule.actions else half


def peaks_in_flight(schedule: Schedule) -> list[int]:
    """Return the maximum number of activations that each device keeps at once.

    An activation belongs to one micro-batch in one stage. It's kept from the forward until the
    backward (or the weight gradient) is done.
    """
    change = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: 0, WEIGHT_GRADIENT: -1}
    return [max(accumulate(change[action.kind] for action in row)) for row in schedule.rows]


def _deadlock(schedule: Schedule, positions: list[int], ended: set[Action]) -> str:
    """Describe which device waits for which, once around the cycle."""
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
