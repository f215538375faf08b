"""Predicts a plan's step: records a rank and, for a pipeline, simulates the schedule of all ranks.

For a pipeline, one rank of each kind of stage is recorded. PyTorch's own FSDP2 and tensor
parallelism shard the stages. Between micro-batches, FSDP2 accumulates unsharded gradients in
float32, and in a stage's last backward, it reduces them across ranks. PyTorch's pipelines reduce
them after the last backward; here, the reduction overlaps with that backward as far as possible.

Every message between stages takes as long as the slowest one, and sending doesn't delay any
computation. Not modeled: messages that wait for each other, or for collectives on the same
adapters.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

import vgpu
from vgpu.plan import schedules
from vgpu.plan.layout import StageLayers, split_layers
from vgpu.plan.parallel_model import (
    ParallelModel,
    adam_with_state,
    pipeline_stage,
    progress,
    without_garbage,
)
from vgpu.plan.plan import Plan, on_cluster
from vgpu.plan.recorded_step import Rank, Step, time_by_cause
from vgpu.plan.schedules import BACKWARD, FORWARD, Action, Box, Schedule, SimulatedSchedule
from vgpu.profiling.peaks import PeakByCause
from vgpu.time.simulate import replay_beside
from vgpu.time.timeline import HostRange, TraceEvent, in_order, union_s


def predict(plan: Plan, **costs: Any) -> Step:
    """Predict rank 0's second step, on a GPU that counts everything and computes nothing.

    Parameters and gradients are bfloat16 with float32 master copies, and AdamW is fused. For a
    pipeline, one rank of each kind of stage is recorded, and the schedule is simulated. ``costs``
    are as for ``vgpu.record`` (``arithmetic_share``, ``fuses``, ``async_tp`` and others); ``gpu``
    and ``network`` override the plan's.
    """
    plan, costs = plan.taking(costs)
    if plan.layout.pp > 1:
        return _predict_pipeline(plan, **costs)
    step = _predict_rank(plan, False, costs)
    assert step is not None
    return step


def predict_if_it_fits(plan: Plan, **costs: Any) -> Step | None:
    """Predict a plan without a pipeline; return None if it doesn't fit.

    That's often known after the first of two steps.
    """
    plan, costs = plan.taking(costs)
    step = _predict_rank(plan, True, costs)
    return step if step is not None and step.fits else None


def _predict_rank(plan: Plan, stops: bool, costs: dict[str, Any]) -> Step | None:
    """Predict rank 0's step or, with ``stops``, return None once too much memory is reserved."""
    with (
        on_cluster(plan) as cluster,
        vgpu.record_memory() as memory,
        progress("predicting: first step, recorded step, allocator", "part", 3) as bar,
    ):

        def reserved_bytes() -> int:
            return memory.reserved(cluster.device, expandable_segments=True).peak_reserved_bytes

        rank = Rank(plan, compiled=bool(costs.get("fuses")))
        bar.update()
        if stops and reserved_bytes() > plan.spec.memory_bytes:
            return None
        step = rank.recorded(plan, **costs)
        bar.update()
        return Step(**vars(step), reserved_bytes=reserved_bytes())


def _predict_pipeline(plan: Plan, **costs: Any) -> "PipelineStep":
    short = shortened(plan)
    ranks: dict[int, RecordedRank] = {}
    actions: dict[tuple[_Kind, ActionContext], vgpu.Timeline] = {}
    with progress("recording stages", "stage", plan.schedule.devices) as bar:
        # Among identical ranks, the first has the most micro-batches in flight.
        for device in range(plan.schedule.devices):
            kind, contexts = _kind(plan, device), action_contexts(short, device)
            if not all((kind, context) in actions for context in contexts.values()):
                ranks[device] = record_rank(plan, short, device, **costs)
                for action, timeline in ranks[device].actions.items():
                    actions.setdefault((kind, contexts[action]), timeline)
            bar.update()
    return _simulated(plan, actions, ranks)


# A rank's state before each action. Actions in the same state take the same time and bytes, so
# ranks with the same stages, and later micro-batches, are recorded only if they reach a new state.


class ActionContext(NamedTuple):
    """What determines how long an action takes."""

    chunk: int
    kind: str
    before: str
    """The kind of the stage's previous action, which decides whether parameters are gathered; empty
    if there is none.
    """
    has_gradients: bool
    """Whether the stage has run a backward, so that there are gradients to accumulate into."""
    last: bool
    """Whether the action is the stage's last backward, which reduces the gradients."""


class RankState(NamedTuple):
    """What determines an action's time and the rank's bytes."""

    context: ActionContext
    in_flight: tuple[int, ...]
    """The number of micro-batches that each chunk keeps."""
    has_gradients: tuple[bool, ...]
    """Whether each chunk has gradients."""


def rank_states(schedule: Schedule, device: int) -> Iterator[tuple[Action, RankState]]:
    """Yield a pipeline device's actions, each with the device's state before it."""
    kept, done = [0] * schedule.chunks, [0] * schedule.chunks
    before: dict[int, str] = {}
    for action in schedule.rows[device]:
        chunk = action.stage // schedule.devices
        last = action.kind == BACKWARD and done[chunk] == schedule.micro_batches - 1
        has_gradients = tuple(number > 0 for number in done)
        context = ActionContext(
            chunk, action.kind, before.get(chunk, ""), has_gradients[chunk], last
        )
        yield action, RankState(context, tuple(kept), has_gradients)
        kept[chunk] += 1 if action.kind == FORWARD else -1
        done[chunk] += action.kind == BACKWARD
        before[chunk] = action.kind


def action_contexts(schedule: Schedule, device: int) -> dict[Action, ActionContext]:
    return {action: state.context for action, state in rank_states(schedule, device)}


def shortened(plan: Plan) -> Schedule:
    """Return the plan's schedule with the fewest micro-batches that reach all of its states."""
    whole = plan.schedule
    step = whole.devices if plan.chunks > 1 else 1
    wanted = _all_states(whole)
    for fewer in range(step, whole.micro_batches, step):
        schedule = plan.schedule_of(fewer)
        if _all_states(schedule) == wanted:
            return schedule
    return whole


def _all_states(schedule: Schedule) -> list[set[RankState]]:
    return [{state for _, state in rank_states(schedule, d)} for d in range(schedule.devices)]


# One rank runs a step on shapes, and each of its actions is recorded separately


class RecordedRank(NamedTuple):
    """One rank's step: its actions in virtual time, and its bytes."""

    actions: dict[Action, vgpu.Timeline]
    update: vgpu.Timeline
    """The optimizer's step."""
    bytes_by_cause: dict[str, int]
    reserved_bytes: int
    in_flight: int
    """The number of micro-batches that the rank keeps at the peak, including the current one."""


def record_rank(plan: Plan, schedule: Schedule, device: int, **costs: Any) -> RecordedRank:
    """Record a step of the first rank with the device's stages.

    ``schedule`` is the plan's, or one with fewer micro-batches; ``costs`` are as for
    ``vgpu.record``.
    """
    actions: dict[Action, vgpu.Timeline] = {}
    peaks: list[tuple[int, int]] = []  # bytes, and micro-batches in flight
    first = device * plan.layout.ranks_per_stage
    with on_cluster(plan, first) as cluster, vgpu.record_memory() as memory:
        gpu = torch.get_device_module("vgpu")
        rank = _StageRank(plan, device, cluster.device, compiled=bool(costs.get("fuses")))
        with PeakByCause(rank.modules, rank.optimizer) as peak:
            for action, state in rank_states(schedule, device):
                gpu.reset_peak_memory_stats()
                is_forward = action.kind == FORWARD
                with vgpu.record(**costs) as timeline, rank.training():
                    if is_forward:
                        rank.forward(action)
                    else:
                        rank.backward(action, state.context.last)
                assert not timeline.races, timeline.races
                actions[action] = timeline
                peaks.append((gpu.max_memory_allocated(), sum(state.in_flight) + is_forward))
            with vgpu.record(**costs) as update:
                rank.optimizer.step()
                rank.optimizer.zero_grad()
        reserved = memory.reserved(cluster.device, expandable_segments=True).peak_reserved_bytes
        return RecordedRank(actions, update, peak.by_cause, reserved, max(peaks)[1])


class _StageRank:
    """One rank's stages, and what it keeps for micro-batches in flight."""

    @without_garbage()
    def __init__(self, plan: Plan, device: int, gpu: torch.device, compiled: bool = False) -> None:
        self._plan, self._gpu = plan, gpu
        mesh = plan.layout.mesh("vgpu")
        sizes = dataclasses.replace(plan.sizes, sequence=plan.tokens_per_sequence)
        self._layers = _stages_of(plan, device)
        with torch.device("meta"):
            parts = {stage: pipeline_stage(sizes, layers) for stage, layers in self._layers.items()}
        models = {stage: ParallelModel(part, plan, mesh) for stage, part in parts.items()}
        for model in models.values():
            model.configure(plan, compiled)
        self._stages = {stage: model.module for stage, model in models.items()}
        self.training = next(iter(models.values())).training
        """The context manager for an action, the same for all stages."""
        self.modules = nn.ModuleList(self._stages.values())
        self.optimizer = adam_with_state(self.modules)
        self._in_flight: dict[Action, torch.Tensor | GradientEdge] = {}

    def forward(self, action: Action) -> None:
        plan, layers = self._plan, self._layers[action.stage]
        size = (plan.micro_batch, plan.tokens_per_sequence)
        tokens = torch.randint(plan.sizes.vocabulary, size, device=self._gpu)
        received = tokens if layers.first else self._hidden().requires_grad_()
        output = self._stages[action.stage](received)
        if layers.last:
            output = F.cross_entropy(output.flatten(0, 1).float(), tokens.flatten())
        # Like the stages of PyTorch 2.15, keep only the graph of a sent tensor; 2.14 keeps the tensor.
        self._in_flight[action] = output if layers.last else get_gradient_edge(output)

    def backward(self, action: Action, last: bool) -> None:
        module = self._stages[action.stage]
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last)
        module.set_requires_gradient_sync(last)
        output = self._in_flight.pop(action._replace(kind=FORWARD))
        gradient = None if self._layers[action.stage].last else self._hidden()
        torch.autograd.backward(output, gradient)

    def _hidden(self) -> torch.Tensor:
        """Return a tensor like those sent between stages: a rank's part of each sequence."""
        plan = self._plan
        size = (plan.micro_batch, plan.tokens_per_sequence // plan.layout.tp, plan.sizes.width)
        return torch.empty(size, device=self._gpu, dtype=torch.bfloat16)


_Kind = tuple[StageLayers, ...]  # the layers of a rank's stages


def _stages_of(plan: Plan, device: int) -> dict[int, StageLayers]:
    """Return the layers of a pipeline device's stages, by stage index."""
    every = split_layers(plan.sizes.layers, plan.layout.pp * plan.chunks)
    return dict(list(enumerate(every))[device :: plan.layout.pp])


def _kind(plan: Plan, device: int) -> _Kind:
    return tuple(_stages_of(plan, device).values())


# The schedule of all stages, with a row for each pipeline rank


class RecordedTimes(schedules.Times):
    """Each action's time, from its timeline, for a single simulation of a schedule.

    A chunk's last backward reduces its gradients. If that reduction outlasts the computation, it
    overlaps with the rank's next actions. If their collectives use the same links, they wait for
    the reduction, and computation waits for them: such an action is simulated again.
    """

    def __init__(
        self, timelines: Mapping[Action, vgpu.Timeline], devices: int, transfer: float
    ) -> None:
        super().__init__(transfer=transfer)
        self.timelines = dict(timelines)
        """Each action's timeline, from its last simulation."""
        self._devices = devices
        self._under_way: dict[int, list[TraceEvent]] = defaultdict(list)
        """Each device's collectives that outlast their actions, with times in the schedule."""

    def end(self, action: Action, chunks: int, start: float) -> float:
        device = action.stage % self._devices
        left = [event for event in self._under_way[device] if event.end_s > start]
        if left:
            others = [_later(event, -start) for event in left]
            self.timelines[action] = replay_beside(self.timelines[action], others)
        timeline = self.timelines[action]
        ready = ready_s(timeline)
        if timeline.makespan_s > ready:
            left += [
                _later(event, start)
                for event in timeline.events
                if event.kind == "collective" and event.end_s > ready
            ]
        self._under_way[device] = left
        return start + ready


def ready_s(timeline: vgpu.Timeline) -> float:
    """Return when the default stream has finished computing; reductions may still be running."""
    return max(e.end_s for e in timeline.events if e.kind == "kernel" and e.stream == 0)


def _later(event: TraceEvent, by_s: float) -> TraceEvent:
    return event._replace(start_s=event.start_s + by_s, end_s=event.end_s + by_s)


@dataclasses.dataclass(frozen=True)
class PipelineStep(Step):
    """A step of all pipeline ranks (the timeline's devices), and the fullest rank's bytes."""

    stage: int
    """The fullest rank's position in the pipeline."""
    in_flight: int
    """Micro-batches that the rank keeps at the peak, counted once per chunk that keeps one."""
    idle_s: float
    """How long the rank waits for other stages."""

    @property
    def time_by_cause(self) -> dict[str, float]:
        """The same as ``RecordedStep.time_by_cause``, for the fullest rank."""
        device = self.timeline.devices[self.stage]
        return time_by_cause(self.timeline, device, idle_s=self.idle_s)


def _simulated(
    plan: Plan,
    actions: Mapping[tuple[_Kind, ActionContext], vgpu.Timeline],
    ranks: Mapping[int, RecordedRank],
) -> PipelineStep:
    """Simulate the schedule; identical ranks share the recordings of their actions and update."""
    schedule = plan.schedule
    alike = {_kind(plan, device): rank for device, rank in reversed(list(ranks.items()))}
    timelines = {
        action: actions[_kind(plan, device), context]
        for device in range(schedule.devices)
        for action, context in action_contexts(schedule, device).items()
    }
    updates = [alike[_kind(plan, device)].update for device in range(schedule.devices)]
    transfer_s = _transfer_s(plan, updates[0].programs[0].costs)
    times = RecordedTimes(timelines, schedule.devices, transfer_s)
    simulated = schedules.simulate(schedule, times)
    timeline = _timeline(plan, simulated, times.timelines, updates)
    stage = max(ranks, key=lambda device: ranks[device].reserved_bytes)
    fullest = ranks[stage]
    return PipelineStep(
        plan,
        timeline,
        (fullest.bytes_by_cause,),
        fullest.reserved_bytes,
        stage,
        fullest.in_flight,
        _idle_s(timeline, stage, simulated.boxes[stage], times.timelines, updates[stage]),
    )


def _transfer_s(plan: Plan, model: vgpu.CostModel) -> float:
    """Return how long a rank takes to send its part of a micro-batch to the next stage."""
    tokens = plan.micro_batch * plan.tokens_per_sequence // plan.layout.tp
    each = plan.layout.ranks_per_stage
    return max(
        model.group_time_s("send", 2 * tokens * plan.sizes.width, [rank, rank + each])
        for rank in range(0, plan.layout.ranks - each, each)
    )


def _reduced_s(row: tuple[Box, ...], timelines: Mapping[Action, vgpu.Timeline]) -> float:
    """Return when a rank has reduced the gradients of all its chunks and can start the update."""
    return max(box.start + timelines[box.action].makespan_s for box in row)


def _idle_s(
    timeline: vgpu.Timeline,
    device: int,
    row: tuple[Box, ...],
    timelines: Mapping[Action, vgpu.Timeline],
    update: vgpu.Timeline,
) -> float:
    """Return how long a rank waits for other stages without a collective in progress."""
    taken = [(event.start_s, event.end_s) for event in timeline.of(timeline.devices[device])]
    taken += [(box.start, box.end) for box in row]
    taken.append((row[-1].end, _reduced_s(row, timelines) + update.makespan_s))
    return timeline.makespan_s - union_s(taken)


def _timeline(
    plan: Plan,
    simulated: SimulatedSchedule,
    timelines: Mapping[Action, vgpu.Timeline],
    updates: list[vgpu.Timeline],
) -> vgpu.Timeline:
    """Return all ranks' events; modules are prefixed with the action, as in "2F0 blocks.1"."""
    count = simulated.schedule.devices
    devices = [torch.device("vgpu", index) for index in range(count)]
    events: list[TraceEvent] = []
    ranges: list[HostRange] = []
    makespan_s = 0.0
    for device, row, update in zip(devices, simulated.boxes, updates, strict=True):
        for box in row:
            name = simulated.schedule.text(box.action)
            events += _moved(timelines[box.action], device, box.start, name)
            # A reduction may outlast its action, but the host's ranges must not overlap.
            ranges.append(HostRange(name, "range", device, 0, False, box.start, box.end))
        reduced_s = _reduced_s(row, timelines)
        events += _moved(update, device, reduced_s, "update")
        makespan_s = max(makespan_s, reduced_s + update.makespan_s)
    return vgpu.Timeline(
        plan.spec.name.removeprefix("Virtual "),
        devices,
        in_order(events),
        [],
        makespan_s,
        makespan_s,
        [index * plan.layout.ranks_per_stage for index in range(count)],
        host_ranges=ranges,
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
