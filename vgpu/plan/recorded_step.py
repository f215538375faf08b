"""The time and memory that one rank of a plan takes for a step.

A rank's step is recorded with all of its layers or, much faster, extrapolated from a few.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from typing import Any

import torch
from torch.nn import functional as F

import vgpu
from vgpu.plan import estimate
from vgpu.plan.parallel_model import ParallelModel, adam, adam_with_state, without_garbage
from vgpu.plan.plan import Plan, on_cluster
from vgpu.plan.transformer import Transformer
from vgpu.profiling.peaks import OTHER, PeakByCause
from vgpu.time.timeline import union_s


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """One rank's recorded step: virtual time and counted bytes."""

    plan: Plan
    timeline: vgpu.Timeline
    peaks: tuple[dict[str, int], ...]
    """Bytes by cause at the peak of each part of the step, as counted by ``vgpu.profiling.peaks``.
    ``ParallelModel.hooked`` says where parts end. The third goes from the first block's forward to
    the last one's backward, so it includes the moment when blocks keep the most.
    """

    @property
    def bytes_by_cause(self) -> dict[str, int]:
        """Bytes allocated at the step's peak."""
        return max(self.peaks, key=lambda peak: sum(peak.values()))

    @property
    def allocated_bytes(self) -> int:
        """The peak of the bytes that tensors take."""
        return sum(self.bytes_by_cause.values())

    @property
    def seconds(self) -> float:
        more_s = 0.0
        if self._unrecorded:
            start_s, end_s = second_micro_batch(self.timeline)
            more_s = self._unrecorded * (end_s - start_s)
        return self.timeline.makespan_s + more_s

    @property
    def _unrecorded(self) -> int:
        """The number of micro-batches that weren't recorded, if gradients are accumulated."""
        return self.plan.accumulate - recorded_micro_batches(self.plan)

    @property
    def tokens_per_s(self) -> float:
        """The tokens/s per GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds

    @property
    def utilization(self) -> float:
        """The model's FLOP/s, without recomputation, as a fraction of the datasheet's peak."""
        flop = estimate.flop_per_token(self.plan.sizes, self.plan.sequence) * self.tokens_per_s
        return flop / self.plan.spec.tensor_flop_per_s

    @property
    def time_by_cause(self) -> dict[str, float]:
        """The step's seconds: computing, each exposed collective, and the rest."""
        device = self.timeline.devices[0]
        causes = time_by_cause(self.timeline, device)
        if self._unrecorded:
            of_one = time_by_cause(self.timeline, device, second_micro_batch(self.timeline))
            causes = {name: s + self._unrecorded * of_one[name] for name, s in causes.items()}
        return causes


@dataclasses.dataclass(frozen=True)
class Step(RecordedStep):
    """One rank's recorded step, including what the allocator reserves."""

    reserved_bytes: int
    """The peak memory that PyTorch's allocator reserves on the GPU."""

    def replayed(self, **changes: Any) -> "Step":
        """Time the same operations again with different costs, as ``vgpu.replay`` does.

        ``changes`` are fields of ``vgpu.CostModel``, and the plan's ``gpu`` and ``network``. Bytes
        don't change.
        """
        timeline = vgpu.replay(self.timeline, **changes)
        plan, _ = self.plan.taking(changes)
        return dataclasses.replace(self, plan=plan, timeline=timeline)

    @property
    def fits(self) -> bool:
        return self.reserved_bytes <= self.plan.spec.memory_bytes


_RECORDED = {False: 2, True: 3}
"""Micro-batches recorded without and with ``sync_once``, in which the last one differs, too."""


def recorded_micro_batches(plan: Plan) -> int:
    """Return how many micro-batches are recorded; the rest take as long as the second."""
    return min(plan.accumulate, _RECORDED[bool(plan.sync_once)])


def second_micro_batch(timeline: vgpu.Timeline) -> tuple[float, float]:
    """Return when the second of several micro-batches starts and ends, in seconds.

    It starts at the end of the first backward pass, and ends with its own.
    """
    computed = [event for event in timeline.events if event.kind == "kernel" and event.stream == 0]
    computed.sort(key=lambda event: event.start_s)
    ends = [
        event.end_s
        for event, following in itertools.pairwise(computed)
        if event.backward and not following.backward
    ]
    start_s, end_s, *_ = ends
    return start_s, end_s


def time_by_cause(
    timeline: vgpu.Timeline,
    device: torch.device,
    window: tuple[float, float] | None = None,
    idle_s: float | None = None,
) -> dict[str, float]:
    """Return where a device's seconds go, from the window's start to its end.

    The window is the whole timeline by default. In a pipeline, the device waits ``idle_s`` for
    other stages.
    """
    start_s, end_s = window or (0.0, timeline.makespan_s)
    intervals: dict[str, list[tuple[float, float]]] = defaultdict(list, computing=[])
    for event in timeline.of(device):
        if event.kind in ("kernel", "collective"):
            cause = "computing" if event.kind == "kernel" else f"waiting for {event.name}"
            from_s = max(event.start_s, start_s)
            intervals[cause].append((from_s, max(from_s, min(event.end_s, end_s))))
    causes, seen, known_s = {}, [], 0.0
    for cause in sorted(intervals):  # "computing" comes first
        seen += intervals[cause]
        now_s = union_s(seen)
        causes[cause] = now_s - known_s
        known_s = now_s
    if idle_s is not None:
        causes["waiting for other stages"] = idle_s
    causes["waiting for the host"] = end_s - start_s - known_s - (idle_s or 0.0)
    return causes


# Training one rank: PyTorch's own parallel code, on shapes


class Rank:
    """A rank's model and optimizer, shared by plans whose steps differ.

    Batch, recomputation and ``reshard_after_forward`` may change from step to step.
    """

    @without_garbage()
    def __init__(self, plan: Plan, takes_a_step: bool = True, compiled: bool = False) -> None:
        """With ``takes_a_step``, the rank takes a training step before the recorded one.

        Otherwise, it only creates the optimizer's state. The recorded step then has the same time
        and allocated bytes, but slightly different reserved bytes, which depend on everything that
        happened before. ``compiled`` blocks save less for their backward pass.
        """
        self._layout, self._compiled = plan.layout, compiled
        with torch.device("meta"):
            whole = Transformer(dataclasses.replace(plan.sizes, sequence=plan.tokens_per_sequence))
        self._parallel = ParallelModel(whole, plan, plan.layout.mesh("vgpu"))
        self.model = self._parallel.module
        if takes_a_step:
            self.optimizer = adam(self.model)
            self.train(plan)
        else:
            self.optimizer = adam_with_state(self.model)

    def train(self, plan: Plan) -> None:
        """Run one step."""
        assert plan.layout == self._layout
        self._parallel.configure(plan, self._compiled)
        size = (plan.batch, plan.tokens_per_sequence)
        count = recorded_micro_batches(plan)
        for micro_batch in range(count):
            syncs = micro_batch == count - 1 or not plan.sync_once
            self.model.set_requires_gradient_sync(syncs)
            self.model.set_reshard_after_backward(syncs)
            tokens = torch.randint(plan.sizes.vocabulary, size, device="vgpu")
            with self._parallel.training():
                # No variable holds the logits, so only the loss keeps them during backward.
                loss = F.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten())
                loss.backward()
                del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recorded(self, plan: Plan, **costs: Any) -> RecordedStep:
        """Record a step and its bytes at the peak; other ``Rank`` objects' bytes don't count."""
        peak = PeakByCause(self.model, self.optimizer)
        with self._parallel.hooked(peak.divide), peak, vgpu.record(**costs) as timeline:
            self.train(plan)
        assert not timeline.races, timeline.races
        own = [{cause: n for cause, n in part.items() if cause != OTHER} for part in peak.parts]
        return RecordedStep(plan, timeline, tuple(own))


# A step extrapolated from recordings with a few layers

RECORDED_LAYERS = (4, 5)
"""The layer counts that ``extrapolate`` records, which differ by one layer. With fewer than four
layers, memory may peak at a different operation.
"""


def extrapolated(
    layers: int, few: float, more: float, *, counts: tuple[int, int] = RECORDED_LAYERS
) -> float:
    """Extrapolate linearly from models with ``counts`` layers to one with ``layers`` layers."""
    return more + (layers - counts[1]) * (more - few) / (counts[1] - counts[0])


def few_layers(plan: Plan) -> tuple[int, int]:
    """Return ``RECORDED_LAYERS``, or more, so that the layers added to the first count are like all
    that follow: they have the experts, if any, and are multiples of ``recompute_every``.
    """
    every, experts = plan.recompute_every, plan.sizes.experts
    least = max(RECORDED_LAYERS[0], 0 if experts is None else experts.dense_layers + 1)
    few = every * math.ceil(least / every)
    return few, few + every


def with_layers(plan: Plan, layers: int) -> Plan:
    """Return the plan for a model with ``layers`` layers."""
    return dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, layers=layers))


@dataclasses.dataclass(frozen=True)
class ExtrapolatedStep:
    """A plan's step, extrapolated from a few layers; much faster than predicting all of them.

    The layers of a transformer are identical (after leading dense ones, if it has experts), so time
    and allocated bytes match the full model's to within a few tenths of a percent, with one
    exception: with very little work per GPU, it may wait for the host or a network, but only after
    more layers than were recorded. Time is then too short. Reserved memory isn't included, because
    it grows in jumps.
    """

    plan: Plan
    steps: tuple[RecordedStep, RecordedStep]

    def seconds(self, **costs: Any) -> float:
        """Return the full model's seconds per step; ``costs`` override the recorded ones, as in
        ``vgpu.replay``.
        """
        few = [
            dataclasses.replace(step, timeline=vgpu.replay(step.timeline, **costs))
            if costs
            else step
            for step in self.steps
        ]
        counts = few_layers(self.plan)
        return extrapolated(self.plan.sizes.layers, *(step.seconds for step in few), counts=counts)

    def tokens_per_s(self, **costs: Any) -> float:
        """Return the tokens/s per GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds(**costs)

    @property
    def bytes_by_cause(self) -> dict[str, float]:
        """Like ``Step.bytes_by_cause``; the sum is the bytes allocated at the peak."""
        peaks = itertools.starmap(self._by_cause, zip(*(s.peaks for s in self.steps), strict=True))
        return max(peaks, key=lambda peak: sum(peak.values()))

    @property
    def time_by_cause(self) -> dict[str, float]:
        return self._by_cause(*(step.time_by_cause for step in self.steps))

    def _by_cause(self, few: dict[str, Any], more: dict[str, Any]) -> dict[str, float]:
        layers = self.plan.sizes.layers
        counts = few_layers(self.plan)
        return {
            name: extrapolated(layers, few.get(name, 0.0), more.get(name, 0.0), counts=counts)
            for name in more | few
        }


def extrapolate(plan: Plan, **costs: Any) -> ExtrapolatedStep:
    """Extrapolate the plan's step from two recordings with a few layers.

    ``costs`` are as for ``predict``. Raises ValueError for a pipeline, and for a model with fewer
    layers than are recorded.
    """
    if plan.layout.pp > 1:
        # One more layer would only make one stage longer; in the full model, all are longer.
        raise ValueError(
            f"a plan with pp = {plan.layout.pp} can't be extrapolated from a few layers, because "
            "they wouldn't be split into stages the same way: use predict()"
        )
    counts = few_layers(plan)
    if plan.sizes.layers < counts[1]:
        raise ValueError(
            f"a model with {plan.sizes.layers} layers is small enough for predict(); extrapolate() "
            f"records {counts[0]} and {counts[1]} layers"
        )
    plan, costs = plan.taking(costs)
    with on_cluster(plan):
        few, more = (
            Rank(small, takes_a_step=False, compiled=bool(costs.get("fuses"))).recorded(
                small, **costs
            )
            for small in (with_layers(plan, layers) for layers in counts)
        )
    return ExtrapolatedStep(plan, (few, more))
