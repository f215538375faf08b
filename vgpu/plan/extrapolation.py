"""Extrapolates a step from recordings with a few layers."""

import dataclasses
import math
from typing import Any

import vgpu
from vgpu.plan.plan import Plan, Rank, RecordedStep, on_cluster

LAYERS = (4, 5)
"""The layer counts that ``extrapolate`` records, which differ by one layer. With fewer than four
layers, memory peaks at a different point of the step.
"""


def extrapolated(
    layers: int, few: float, more: float, *, counts: tuple[int, int] = LAYERS
) -> float:
    """Extrapolate linearly from models with ``counts`` layers to one with ``layers`` layers."""
    return more + (layers - counts[1]) * (more - few) / (counts[1] - counts[0])


def few_layers(plan: Plan) -> tuple[int, int]:
    """Return the layer counts to record: ``LAYERS``, or multiples of ``recompute_every``."""
    every = plan.recompute_every
    if every == 1:
        return LAYERS
    few = every * math.ceil(LAYERS[0] / every)
    return few, few + every


def with_layers(plan: Plan, layers: int) -> Plan:
    """Return the plan for a model with ``layers`` layers."""
    return dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, layers=layers))


@dataclasses.dataclass(frozen=True)
class ExtrapolatedStep:
    """A plan's step, extrapolated from a few layers; much faster than predicting all of them.

    All layers of a transformer are identical, so time and allocated bytes match the full model's to
    within a few tenths of a percent. Reserved memory isn't included, because it grows in jumps.
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
        return self._by_cause(*(step.bytes_by_cause for step in self.steps))

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
