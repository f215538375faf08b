"""Pipeline schedules as plain data: for each device a row of actions, in the order it takes them.

A network is cut into stages, the batch into micro-batches. The rows say which device has which
stage. In the schedules made here device d has stage d, and with v chunks also d + devices, and so
on round; a row written by hand may place them in another way, such as in a V.

Sources: GPipe (Huang et al., 2019), PipeDream-Flush (Narayanan et al., 2021a, "Memory-efficient
pipeline-parallel DNN training"), Megatron-LM (Narayanan et al., 2021b, "Efficient large-scale
language model training on GPU clusters"), zero bubble (Qi et al., 2023, "Zero bubble pipeline
parallelism").
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
_TEXT = re.compile(r"(\d*)([FBIW])(\d+)")


class Action(NamedTuple):
    """One micro-batch in one stage, in one direction.

    kind: "F" forward; "B" backward; or backward in two halves, "I" for the gradient of the stage's
    input and "W" for those of its weights.
    """

    kind: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """As torch.distributed.pipelining writes it: "2F0" is micro-batch 0 forward in stage 2."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """A row of actions for each device; each device has ``chunks`` stages.

    Raises ValueError unless each stage takes each micro-batch forward once and backward once, whole
    or in two halves, all on one device. Whether the rows fit together is another question, which
    ``play`` of simulation.py answers.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.devices < 1 or self.chunks < 1 or not any(self.rows):
            raise ValueError(f"{self.name}: at least one device, one chunk and one action")
        seen: set[Action] = set()
        for device, row in enumerate(self.rows):
            for action in row:
                self._check(action, device, seen)
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches):
                self._check_complete(stage, micro_batch, seen)
        for device in range(self.devices):
            own = [stage for stage, at in self._placement.items() if at == device]
            if len(own) != self.chunks:
                raise ValueError(
                    f"device {device} has {len(own)} stages {own}, expected {self.chunks}: "
                    "each device takes the same number of stages"
                )

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return self.devices * self.chunks

    def device_of(self, stage: int) -> int:
        """The device whose row has the stage."""
        return self._placement[stage]

    @cached_property
    def _placement(self) -> dict[int, int]:
        placement: dict[int, int] = {}
        for device, row in enumerate(self.rows):
            for action in row:
                placement.setdefault(action.stage, device)
        return placement

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max(action.micro_batch for row in self.rows for action in row)

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)

    def text(self, action: Action) -> str:
        """An action as ``from_text`` takes it, without its stage if each device has only one."""
        return str(action) if self.chunks > 1 else f"{action.kind}{action.micro_batch}"

    def __str__(self) -> str:
        lines = [" ".join(map(self.text, row)) for row in self.rows]
        return "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))

    def _check(self, action: Action, device: int, seen: set[Action]) -> None:
        if action.kind not in (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
            raise ValueError(f"device {device}: {action} has a kind other than F, B, I and W")
        if not 0 <= action.stage < self.stages:
            raise ValueError(
                f"device {device}: {action} is of no stage from 0 to {self.stages - 1}"
            )
        if self.device_of(action.stage) != device:
            raise ValueError(
                f"device {device}: {action} is of stage {action.stage}, "
                f"which is in the row of device {self.device_of(action.stage)}"
            )
        if action.micro_batch < 0:
            raise ValueError(f"device {device}: {action} has a negative micro-batch")
        if action in seen:
            raise ValueError(f"device {device}: {action} comes twice")
        seen.add(action)

    def _check_complete(self, stage: int, micro_batch: int, seen: set[Action]) -> None:
        kinds = "".join(k for k in "FBIW" if Action(k, micro_batch, stage) in seen)
        if kinds not in ("FB", "FIW"):
            place = f"device {self.device_of(stage)}: " if stage in self._placement else ""
            raise ValueError(
                f"{place}stage {stage} takes micro-batch {micro_batch} "
                f"through {kinds or 'nothing'}; expected F and B, or F, I and W, once each"
            )


def from_text(rows: Sequence[str | Sequence[str]], name: str = "by hand") -> Schedule:
    """A schedule from texts: ``from_text(["F0 F1 B0 B1", "F0 B0 F1 B1"])``, one for each device.

    A row may also be a list of single actions. A number in front, as in "4F0", is the stage;
    without it, device d means stage d. Raises ValueError if a text is not an action.
    """
    made = []
    for device, row in enumerate(rows):
        actions = []
        for text in row.split() if isinstance(row, str) else row:
            parts = _TEXT.fullmatch(text)
            if parts is None:
                raise ValueError(f"device {device}: {text!r} is not an action such as F0 or B3")
            stage, kind, micro_batch = parts.groups()
            actions.append(Action(kind, int(micro_batch), int(stage) if stage else device))
        made.append(tuple(actions))
    last = max((action.stage for row in made for action in row), default=0)
    return Schedule(name, tuple(made), last // max(len(made), 1) + 1)


def all_forward_all_backward(devices: int, micro_batches: int) -> Schedule:
    """GPipe: every micro-batch forward first, then every one backward.

    Bubble: (p - 1) / (m + p - 1) of the time, for p devices and m micro-batches (GPipe, 2.3). Every
    device keeps the activations of all m micro-batches.
    """
    _check_counts(devices, micro_batches)
    rows = [
        [Action(kind, m, device) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)]
        for device in range(devices)
    ]
    return _made("all forward, all backward", rows)


def _in_turn(warm: int, forwards: list[Action], backwards: list[list[Action]]) -> list[Action]:
    """``warm`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    row = forwards[:warm]
    for forward, backward in zip_longest(forwards[warm:], backwards):
        if forward is not None:
            row.append(forward)
        row += backward
    return row


def one_forward_one_backward(devices: int, micro_batches: int) -> Schedule:
    """1F1B, as PipeDream-Flush: after a warm-up, one forward and one backward in turn.

    The same bubble as all forward, all backward: (p - 1) / (m + p - 1) (Megatron-LM, 2.2.1). Device
    d keeps the activations of at most min(p - d, m) micro-batches.
    """
    _check_counts(devices, micro_batches)
    rows = []
    for device in range(devices):
        forwards = [Action(FORWARD, m, device) for m in range(micro_batches)]
        backwards = [[Action(BACKWARD, m, device)] for m in range(micro_batches)]
        rows.append(_in_turn(devices - device - 1, forwards, backwards))
    return _made("1F1B", rows)


def interleaved(devices: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: v chunks on each device, so that a micro-batch comes round v times.

    Bubble: (p - 1) / (v m + p - 1) of the time: Megatron-LM, 2.2.2, gives it as a share of the
    ideal time, (p - 1) / (v m). Device 0 keeps at most v p + p - 1 chunks' activations, each
    1 / v of a device's layers (Korthikanti et al., 2022, 4.2.3). Raises ValueError unless the
    number of micro-batches is a multiple of the number of devices.
    """
    _check_counts(devices, micro_batches)
    if chunks < 1:
        raise ValueError(f"a device has at least one chunk, got {chunks}")
    if micro_batches % devices:
        raise ValueError(
            f"interleaving takes micro-batches in rounds of {devices}, one for each device: "
            f"{micro_batches} is not a multiple of it"
        )
    total = micro_batches * chunks

    def nth(kind: str, n: int, device: int) -> Action:
        """The n-th forward or backward of a device: rounds of p micro-batches, chunk by chunk."""
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
    return _made(f"interleaved 1F1B, {chunks} chunks", rows, chunks)


def zero_bubble(devices: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with backward in two halves; the gradients of weights wait, and fill the bubble.

    Nothing waits for the gradients of weights, so device d puts off those of d micro-batches. If
    the three parts take equally long, the bubble is (p - 1) / (3 m + p - 1), a third of 1F1B's idle
    time (Qi et al., 2.3 and table 2). It asks for m >= p. Every device keeps the activations of at
    most min(p, m) micro-batches.
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
        put_off = weights[max(micro_batches - device, 0) :]
        rows.append(_in_turn(devices - device - 1, forwards, backwards) + put_off)
    return _made("zero bubble (ZB-H1)", rows)


KINDS: dict[str, Callable[[int, int], Schedule]] = {
    "all forward, all backward": all_forward_all_backward,
    "1F1B": one_forward_one_backward,
    "interleaved 1F1B, 2 chunks": interleaved,
    "zero bubble (ZB-H1)": zero_bubble,
}
"""The schedules of this file by name, each a function of devices and micro-batches."""


def _made(name: str, rows: Sequence[Sequence[Action]], chunks: int = 1) -> Schedule:
    return Schedule(name, tuple(tuple(row) for row in rows), chunks)


def _check_counts(devices: int, micro_batches: int) -> None:
    for name, count in (("devices", devices), ("micro-batches", micro_batches)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: a whole number from 1, got {count!r}")
