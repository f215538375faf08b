"""One rank of a plan's cluster trains: PyTorch's own parallel code, of which only the shapes exist."""

import dataclasses
from typing import Any

import torch
from torch.nn import functional as F

import vgpu
from vgpu.plan.model import Divided, on_cluster, progress, state_bytes, without_garbage
from vgpu.plan.parallel import loss_context
from vgpu.plan.pipelines import predict_pipeline
from vgpu.plan.step import Plan, Recorded, Step
from vgpu.plan.transformer import Transformer
from vgpu.profiling.peaks import OTHER, PeakByCause


def predict(plan: Plan, **costs: Any) -> Step:
    """The second step of a rank whose GPU computes nothing and counts everything.

    It is rank 0, unless groups of others span more hosts and are slower: then one of those.
    bfloat16 parameters and gradients with float32 master copies and reduction, AdamW fused. A plan
    with stages is one rank of each kind of stage, and a schedule played (pipelines). costs: as for
    ``vgpu.record`` (``arithmetic_share``, ``fuses``, ``async_tp`` and others); ``gpu`` and
    ``network`` take the place of the plan's.
    """
    plan, costs = plan.taking(costs)
    if plan.layout.stages > 1:
        return predict_pipeline(plan, **costs)
    with (
        on_cluster(plan) as cluster,
        vgpu.record_memory() as memory,
        progress("predicting: a step, one recorded, the allocator", 3, "part") as bar,
    ):
        rank = Rank(plan)
        bar.update()
        step = rank.recorded(plan, **costs)
        bar.update()
        reserved = memory.reserved(cluster.device, expandable_segments=True)
        return Step(**vars(step), reserved_bytes=reserved.peak_reserved_bytes)


class Rank:
    """The model and the optimizer of a rank, for plans that differ in what a step does.

    Batch, checkpoints and whether parameters are gathered again may change from step to step.
    """

    @without_garbage()
    def __init__(self, plan: Plan, takes_a_step: bool = True) -> None:
        """takes_a_step: whether it has trained before it is asked.

        If not, it only makes the optimizer's state. Seconds and allocated bytes of a step are the same
        then, and what the allocator reserves is not quite: that depends on all that went before.
        """
        self._layout = plan.layout
        mesh = plan.layout.mesh("vgpu")
        whole = Transformer(dataclasses.replace(plan.sizes, sequence=plan.sequence))
        self._divided = Divided(whole, plan, mesh)
        self.model = self._divided.module
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        if takes_a_step:
            self.train(plan)  # and makes the optimizer's state
        else:
            self._make_state()

    def _make_state(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, plan: Plan) -> None:
        """One step."""
        assert plan.layout == self._layout
        self._divided.set(plan)
        size = (plan.batch, plan.sequence)
        tokens = torch.randint(plan.sizes.vocabulary, size, device="vgpu")
        with loss_context(self._layout):
            # Nothing but the loss holds the logits during the backward pass.
            F.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, plan: Plan, **costs: Any) -> tuple[vgpu.Timeline, dict[str, int]]:
        """One step, and what it has allocated at its peak, without what other ``Rank``s have."""
        with PeakByCause(self.model, self.optimizer) as peak, vgpu.record(**costs) as timeline:
            self.train(plan)
        assert not timeline.races, timeline.races
        return timeline, {cause: size for cause, size in peak.by_cause.items() if cause != OTHER}

    def recorded(self, plan: Plan, **costs: Any) -> Recorded:
        """One step, and what there is to know of it without an allocator."""
        timeline, by_cause = self.timed(plan, **costs)
        return Recorded(plan, timeline, sum(by_cause.values()), self.state_bytes(), by_cause)

    def state_bytes(self) -> dict[str, int]:
        return state_bytes(self.optimizer)
