"""A plan's step from two recordings with few of its layers: seconds where the whole takes many.

All layers of a transformer are alike, so a step is what two sizes of it say, continued; time and
allocated bytes to a few thousandths (``tests/vgpu/plan/test_few_layers.py``). With fewer than four layers
the most bytes are taken at another moment of the step, so both have at least four. What the
allocator reserves beyond that is not continued: it goes in leaps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import vgpu
from vgpu.plan.model import on_cluster
from vgpu.plan.rank import Rank
from vgpu.plan.step import Plan, Recorded

Number = TypeVar("Number", int, float)

LAYERS = (4, 5)  # neighbours: what the last one adds is what each one adds


def continued(layers: int, few: Number, more: Number) -> Number:
    """What ``LAYERS`` of a model take, continued to all of its layers."""
    return more + (layers - LAYERS[1]) * (more - few)


def with_layers(plan: Plan, layers: int) -> Plan:
    """The plan for a model of so many layers."""
    return dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, layers=layers))


@dataclasses.dataclass(frozen=True)
class FewLayers:
    """A plan, and its steps with ``LAYERS`` of its layers."""

    plan: Plan
    steps: tuple[Recorded, Recorded]

    def seconds(self, **costs: Any) -> float:
        """Of a step of the whole model; costs: other ones than recorded, as for ``vgpu.replay``."""
        few = [s.timeline if not costs else vgpu.replay(s.timeline, **costs) for s in self.steps]
        return self._continued(*(timeline.makespan_s for timeline in few))

    def tokens_per_s(self, **costs: Any) -> float:
        """Of one GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds(**costs)

    @property
    def bytes_by_cause(self) -> dict[str, float]:
        """As ``Step.bytes_by_cause``; together, what is allocated at the peak."""
        few, more = (step.bytes_by_cause for step in self.steps)
        return {cause: self._continued(few[cause], more[cause]) for cause in few}

    @property
    def time_by_cause(self) -> dict[str, float]:
        few, more = (step.time_by_cause for step in self.steps)
        names = [*more, *(name for name in few if name not in more)]
        return {n: self._continued(few.get(n, 0.0), more.get(n, 0.0)) for n in names}

    def _continued(self, few: float, more: float) -> float:
        return continued(self.plan.sizes.layers, few, more)


def in_few_layers(plan: Plan, **costs: Any) -> FewLayers:
    """The plan, from two recordings with few layers; costs: as for ``predict``.

    ValueError for a pipeline, and for a model that has no more layers than those.
    """
    check(plan)
    plan, costs = plan.taking(costs)
    with on_cluster(plan):
        return recorded(plan, ranks_of(plan), **costs)


def check(plan: Plan) -> None:
    """ValueError for a pipeline, or for a model that has no more layers than ``LAYERS``."""
    if plan.layout.stages > 1:
        # A layer more is one more on one stage, and a whole model has as many more on each.
        raise ValueError(
            f"a plan of {plan.layout.stages} stages cannot be continued from few layers, which are "
            "too few to divide alike: ask predict() for the whole of it"
        )
    if plan.sizes.layers < LAYERS[1]:
        raise ValueError(
            f"a model of {plan.sizes.layers} layers is small enough for predict(); few layers are "
            f"{LAYERS[0]} and {LAYERS[1]}"
        )


def ranks_of(plan: Plan) -> list[Rank]:
    """On the plan's cluster: a rank with each number of layers, for all plans of its layout."""
    return [Rank(with_layers(plan, layers), takes_a_step=False) for layers in LAYERS]


def recorded(plan: Plan, ranks: Sequence[Rank], **costs: Any) -> FewLayers:
    """The plan, from a step of each of the ranks that its layout has."""
    few, more = (
        rank.recorded(with_layers(plan, layers), **costs)
        for layers, rank in zip(LAYERS, ranks, strict=True)
    )
    return FewLayers(plan, (few, more))
