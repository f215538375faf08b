"""What a rank of a pipeline is in before each action: equal states take equal time and bytes.

So of ranks with the same stages, and of many micro-batches, only those are recorded that bring a
state which no other has had.
"""

from collections.abc import Iterator
from typing import NamedTuple

from vgpu.plan.schedules import BACKWARD, FORWARD, Action, Schedule
from vgpu.plan.step import Plan


class Moment(NamedTuple):
    """What decides how long an action takes."""

    chunk: int
    kind: str
    before: str
    """The kind of the stage's action before: whether parameters are gathered. Empty: none."""
    begun: bool
    """Whether the stage has had a backward, so that there are gradients to add to."""
    last: bool
    """Whether it is the stage's last backward, which reduces the gradients."""


class State(NamedTuple):
    """What decides how many bytes it takes as well."""

    moment: Moment
    in_flight: tuple[int, ...]
    """Micro-batches that each chunk keeps."""
    all_begun: tuple[bool, ...]
    """``begun`` of each chunk."""


def states(schedule: Schedule, device: int) -> Iterator[tuple[Action, State]]:
    """The actions of a device of the pipeline, and its state before each."""
    kept, done = [0] * schedule.chunks, [0] * schedule.chunks
    before: dict[int, str] = {}
    for action in schedule.rows[device]:
        chunk = action.stage // schedule.devices
        last = action.kind == BACKWARD and done[chunk] == schedule.micro_batches - 1
        begun = tuple(number > 0 for number in done)
        moment = Moment(chunk, action.kind, before.get(chunk, ""), begun[chunk], last)
        yield action, State(moment, tuple(kept), begun)
        kept[chunk] += 1 if action.kind == FORWARD else -1
        done[chunk] += action.kind == BACKWARD
        before[chunk] = action.kind


def moments(schedule: Schedule, device: int) -> dict[Action, Moment]:
    """When the actions of a device come."""
    return {action: state.moment for action, state in states(schedule, device)}


def shortened(plan: Plan) -> Schedule:
    """The plan's schedule with as few micro-batches as bring each rank into all the same states."""
    whole = plan.schedule
    step = whole.devices if plan.chunks > 1 else 1
    wanted = _all_states(whole)
    for fewer in range(step, whole.micro_batches, step):
        schedule = plan.schedule_of(fewer)
        if _all_states(schedule) == wanted:
            return schedule
    return whole


def _all_states(schedule: Schedule) -> list[set[State]]:
    return [{state for _, state in states(schedule, d)} for d in range(schedule.devices)]
