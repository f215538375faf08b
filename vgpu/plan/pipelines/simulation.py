"""A schedule played with the recorded times of its actions, and a lane for each stage's rank.

What a stage sends arrives after the time of a message between neighbouring stages, the slowest of
them, and holds up nobody's computing. Not modelled: messages that wait for one another, or for
collectives of the same adapters.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import vgpu
from vgpu.plan import schedules
from vgpu.plan.model import progress
from vgpu.plan.parallel import parts
from vgpu.plan.pipelines.ranks import Recorded, recorded
from vgpu.plan.pipelines.states import Moment, moments, shortened
from vgpu.plan.pipelines.times import Times
from vgpu.plan.schedules import Action, Box
from vgpu.plan.step import Plan, Step
from vgpu.time.timeline import TraceEvent, in_order, union_s

_Kind = tuple[Any, ...]  # what the stages of a rank have, and where its groups lie


def predict_pipeline(plan: Plan, **costs: Any) -> "PipelineStep":
    """As ``predict``, for a plan with stages."""
    short = shortened(plan)
    ranks: dict[int, Recorded] = {}
    known: dict[tuple[_Kind, Moment], vgpu.Timeline] = {}
    with progress("recording stages", plan.schedule.devices, "stage") as bar:
        # The rank in front is the one with most micro-batches in flight of those that are alike.
        for device in range(plan.schedule.devices):
            kind, when = _kind(plan, device), moments(short, device)
            if not all((kind, moment) in known for moment in when.values()):
                ranks[device] = recorded(plan, short, device, **costs)
                for action, timeline in ranks[device].actions.items():
                    known.setdefault((kind, when[action]), timeline)
            bar.update()
    return _played(_Parts(plan, known, ranks))


class _Parts(NamedTuple):
    """What the ranks of a pipeline have recorded, each of those that are alike once."""

    plan: Plan
    actions: dict[tuple[_Kind, Moment], vgpu.Timeline]
    ranks: dict[int, Recorded]
    """By device. Of their actions those count that stand above."""


@dataclasses.dataclass(frozen=True)
class PipelineStep(Step):
    """A step of all stages."""

    parts: _Parts = dataclasses.field(kw_only=True, repr=False)

    def replayed(self, **changes: Any) -> "PipelineStep":
        """As ``Step.replayed``: each rank's actions are played again, and the schedule with them."""
        plan, actions, ranks = self.parts
        again = {key: vgpu.replay(timeline, **changes) for key, timeline in actions.items()}
        updates = {
            device: rank._replace(update=vgpu.replay(rank.update, **changes))
            for device, rank in ranks.items()
        }
        changed, _ = plan.taking(changes)
        return _played(_Parts(changed, again, updates))


def _played(found: _Parts) -> PipelineStep:
    plan, known, ranks = found
    schedule = plan.schedule
    alike = {_kind(plan, device): rank for device, rank in reversed(ranks.items())}
    played = {
        action: known[_kind(plan, device), moment]
        for device in range(schedule.devices)
        for action, moment in moments(schedule, device).items()
    }
    updates = [alike[_kind(plan, device)].update for device in range(schedule.devices)]
    transfer_s = _transfer_s(plan, updates[0].programs[0].costs)
    times = Times(played, schedule.devices, transfer_s)
    play = schedules.play(schedule, times)
    timeline = _timeline(plan, play, times.played, updates)
    stage = max(ranks, key=lambda device: ranks[device].reserved_bytes)
    fullest = ranks[stage]
    return PipelineStep(
        plan,
        timeline,
        sum(fullest.peak_by_cause.values()),
        fullest.state_bytes,
        fullest.peak_by_cause,
        stage,
        fullest.in_flight,
        _idle_s(timeline, stage, play.boxes[stage], times.played, updates[stage]),
        reserved_bytes=fullest.reserved_bytes,
        parts=found,
    )


def _kind(plan: Plan, device: int) -> _Kind:
    all_parts = parts(plan.sizes.layers, plan.layout.stages * plan.chunks)
    return (*all_parts[device :: plan.layout.stages], plan.slowest(device).placements)


def _transfer_s(plan: Plan, model: vgpu.CostModel) -> float:
    """A rank sends its part of a micro-batch to its neighbour in the next stage."""
    tokens = plan.micro_batch * plan.sequence // plan.layout.tensors
    each = plan.layout.ranks_of_a_stage
    return max(
        model.group_time_s("send", 2 * tokens * plan.sizes.width, [rank, rank + each])
        for rank in range(0, plan.layout.ranks - each, each)
    )


def _reduced_s(row: tuple[Box, ...], played: Mapping[Action, vgpu.Timeline]) -> float:
    """When a rank has the gradients of all its chunks, and can begin the update."""
    return max(box.start + played[box.action].makespan_s for box in row)


def _idle_s(
    timeline: vgpu.Timeline,
    device: int,
    row: tuple[Box, ...],
    played: Mapping[Action, vgpu.Timeline],
    update: vgpu.Timeline,
) -> float:
    """How long a rank waits for other stages, and has no collective under way meanwhile."""
    taken = [(event.start_s, event.end_s) for event in timeline.of(timeline.devices[device])]
    taken += [(box.start, box.end) for box in row]
    taken.append((row[-1].end, _reduced_s(row, played) + update.makespan_s))
    return timeline.makespan_s - union_s(taken)


def _timeline(
    plan: Plan,
    play: schedules.Play,
    played: Mapping[Action, vgpu.Timeline],
    updates: list[vgpu.Timeline],
) -> vgpu.Timeline:
    """All ranks' events; modules bear the action in front, such as "2F0 blocks.1"."""
    count = play.schedule.devices
    devices = [torch.device("vgpu", index) for index in range(count)]
    events: list[TraceEvent] = []
    makespan_s = 0.0
    for device, row, update in zip(devices, play.boxes, updates, strict=True):
        for box in row:
            name = play.schedule.text(box.action)
            events += _moved(played[box.action], device, box.start, name)
        reduced_s = _reduced_s(row, played)
        events += _moved(update, device, reduced_s, "update")
        makespan_s = max(makespan_s, reduced_s + update.makespan_s)
    return vgpu.Timeline(
        plan.spec.name.removeprefix("Virtual "),
        devices,
        in_order(events),
        [],
        makespan_s,
        makespan_s,
        [plan.slowest(index).rank for index in range(count)],
    )


def _moved(
    timeline: vgpu.Timeline, device: torch.device, by_s: float, name: str
) -> list[TraceEvent]:
    return [
        event._replace(
            device=device,
            start_s=event.start_s + by_s,
            end_s=event.end_s + by_s,
            launch_s=event.launch_s + by_s,
            ready_s=None if event.ready_s is None else event.ready_s + by_s,
            module=f"{name} {event.module}".rstrip(),
        )
        for event in timeline.events
        if event.kind != "wait"
    ]
