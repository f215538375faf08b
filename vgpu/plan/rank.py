"""One rank of a plan's cluster trains: PyTorch's own parallel code, of which only the shapes exist."""

import dataclasses
from typing import Any

import torch
from torch.nn import functional as F

import vgpu
from vgpu.plan.layout import ParallelModel, adam_with_state, loss_context, progress, without_garbage
from vgpu.plan.pipelines import predict_pipeline
from vgpu.plan.plan import Plan, RecordedStep, Step, on_cluster
from vgpu.plan.transformer import Transformer
from vgpu.profiling.peaks import OTHER, PeakByCause

LAYERS = (4, 5)
"""What ``extrapolate`` records: neighbors, since what the last layer adds is what each one adds. With
fewer than four layers the most bytes are allocated at another point of the step."""


def predict(plan: Plan, **costs: Any) -> Step:
    """The second step of rank 0, whose GPU computes nothing and counts everything.

    bfloat16 parameters and gradients with float32 master copies and reduction, AdamW fused. Of a
    pipeline, one rank of each kind of stage is recorded, and the schedule simulated. costs: as for
    ``vgpu.record`` (``arithmetic_share``, ``fuses``, ``async_tp`` and others); ``gpu`` and
    ``network`` take the place of the plan's.
    """
    plan, costs = plan.taking(costs)
    if plan.layout.pp > 1:
        return predict_pipeline(plan, **costs)
    with (
        on_cluster(plan) as cluster,
        vgpu.record_memory() as memory,
        progress("predicting: a step, one recorded, the allocator", "part", 3) as bar,
    ):
        rank = Rank(plan)
        bar.update()
        step = rank.recorded(plan, **costs)
        bar.update()
        reserved = memory.reserved(cluster.device, expandable_segments=True)
        return Step(**vars(step), reserved_bytes=reserved.peak_reserved_bytes)


class Rank:
    """The model and the optimizer of a rank, for plans that differ in what a step does.

    Batch, recomputation and whether parameters are gathered again may change from step to step.
    """

    @without_garbage()
    def __init__(self, plan: Plan, takes_a_step: bool = True) -> None:
        """takes_a_step: whether it has trained before it is asked.

        If not, it only makes the optimizer's state. Seconds and allocated bytes of a step are the same
        then, and what the allocator reserves is not quite: that depends on all that went before.
        """
        self._layout = plan.layout
        whole = Transformer(dataclasses.replace(plan.sizes, sequence=plan.sequence))
        self._parallel = ParallelModel(whole, plan.layout, plan.layout.mesh("vgpu"))
        self.model = self._parallel.module
        if takes_a_step:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
            self.train(plan)
        else:
            self.optimizer = adam_with_state(self.model)

    def train(self, plan: Plan) -> None:
        """One step."""
        assert plan.layout == self._layout
        self._parallel.configure(plan.recompute, plan.reshard_after_forward)
        size = (plan.batch, plan.sequence)
        tokens = torch.randint(plan.sizes.vocabulary, size, device="vgpu")
        with loss_context(self._layout):
            # Nothing but the loss holds the logits during the backward pass.
            F.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recorded(self, plan: Plan, **costs: Any) -> RecordedStep:
        """One step, and what it has allocated at its peak, without what other ``Rank``s have."""
        with PeakByCause(self.model, self.optimizer) as peak, vgpu.record(**costs) as timeline:
            self.train(plan)
        assert not timeline.races, timeline.races
        own = {cause: size for cause, size in peak.by_cause.items() if cause != OTHER}
        return RecordedStep(plan, timeline, own)


# From few layers to all


def extrapolated(layers: int, few: float, more: float) -> float:
    """What a model of so many layers takes, from what models of ``LAYERS`` take."""
    return more + (layers - LAYERS[1]) * (more - few)


def with_layers(plan: Plan, layers: int) -> Plan:
    """The plan for a model of so many layers."""
    return dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, layers=layers))


@dataclasses.dataclass(frozen=True)
class ExtrapolatedStep:
    """A plan's step from those with ``LAYERS`` of its layers, in seconds where the whole takes many.

    All layers of a transformer are alike, so time and allocated bytes are those of the whole to a
    few thousandths. What the allocator reserves beyond that is missing: it grows in leaps.
    """

    plan: Plan
    steps: tuple[RecordedStep, RecordedStep]

    def seconds(self, **costs: Any) -> float:
        """Of a step of the whole model; costs: other ones than recorded, as for ``vgpu.replay``."""
        few = [s.timeline if not costs else vgpu.replay(s.timeline, **costs) for s in self.steps]
        return extrapolated(self.plan.sizes.layers, *(timeline.makespan_s for timeline in few))

    def tokens_per_s(self, **costs: Any) -> float:
        """Of one GPU."""
        return self.plan.tokens / self.plan.layout.ranks / self.seconds(**costs)

    @property
    def bytes_by_cause(self) -> dict[str, float]:
        """As ``Step.bytes_by_cause``; together, what is allocated at the peak."""
        return self._by_cause(*(step.bytes_by_cause for step in self.steps))

    @property
    def time_by_cause(self) -> dict[str, float]:
        return self._by_cause(*(step.time_by_cause for step in self.steps))

    def _by_cause(self, few: dict[str, Any], more: dict[str, Any]) -> dict[str, float]:
        layers = self.plan.sizes.layers
        return {n: extrapolated(layers, few.get(n, 0.0), more.get(n, 0.0)) for n in more | few}


def extrapolate(plan: Plan, **costs: Any) -> ExtrapolatedStep:
    """The plan's step, from two recordings with few layers; costs: as for ``predict``.

    ValueError for a pipeline, and for a model that has no more layers than those.
    """
    if plan.layout.pp > 1:
        # A layer more is one more on one stage, and a whole model has as many more on each.
        raise ValueError(
            f"a plan of {plan.layout.pp} stages cannot be extrapolated from few layers, which are "
            "too few to divide alike: ask predict() for the whole of it"
        )
    if plan.sizes.layers < LAYERS[1]:
        raise ValueError(
            f"a model of {plan.sizes.layers} layers is small enough for predict(); extrapolate() "
            f"records {LAYERS[0]} and {LAYERS[1]}"
        )
    plan, costs = plan.taking(costs)
    with on_cluster(plan):
        few, more = (
            Rank(small, takes_a_step=False).recorded(small, **costs)
            for small in (with_layers(plan, layers) for layers in LAYERS)
        )
    return ExtrapolatedStep(plan, (few, more))
