"""Rank 0 of a plan's cluster trains: PyTorch's own parallel code, of which only the shapes exist."""

import dataclasses
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from helpers import vgpu
from helpers.models import Transformer
from helpers.parallel import loss_context, shard, share_tensors
from helpers.peaks import OTHER, PeakByCause
from helpers.plan.step import Plan, Step

_NO_LIMIT_BYTES = 2**50  # a plan that does not fit is still counted


def predict(plan: Plan, **costs: Any) -> Step:
    """The second step of rank 0, whose GPU computes nothing and counts everything.

    bfloat16 parameters and gradients with float32 master copies and reduction, AdamW fused. costs:
    as for ``vgpu.record`` (``arithmetic_share``, ``fuses`` and others).
    """
    with on_cluster(plan), vgpu.record_memory() as memory:
        rank = Rank(plan)
        timeline, by_cause = rank.timed(plan, **costs)
        reserved = memory.reserved("vgpu:0", expandable_segments=True)
        return Step(
            plan,
            timeline,
            sum(by_cause.values()),
            reserved.peak_reserved_bytes,
            rank.state_bytes(),
            peak_by_cause=by_cause,
        )


@contextmanager
def on_cluster(plan: Plan) -> Iterator[None]:
    """In the block this process is rank 0 of the plan's cluster, and tensors are shapes."""
    cluster = vgpu.cluster(
        plan.hosts,
        min(plan.gpus_per_host, plan.layout.ranks),
        gpu=plan.spec,
        network=plan.network,
        memory_bytes=_NO_LIMIT_BYTES,
    )
    with cluster, vgpu.shapes_only():
        yield


class Rank:
    """The model and the optimizer of rank 0, for plans that differ in what a step does.

    Batch, checkpoints and whether parameters are gathered again may change from step to step.
    """

    def __init__(self, plan: Plan) -> None:
        self._layout = plan.layout
        mesh = plan.layout.mesh("vgpu")
        # Made on the host: of the whole model a GPU need not have room for more than its own part.
        model = Transformer(dataclasses.replace(plan.sizes, sequence=plan.sequence))
        if plan.layout.tensors > 1:
            share_tensors(model, mesh["tensors"])
        self._forwards = [block.forward for block in model.blocks]
        copies = ("replicas", "shards") if plan.layout.replicas > 1 else ("shards",)
        shard(
            model,
            list(model.blocks),
            mesh[copies],
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        self.model = model.to("vgpu")
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.train(plan)  # the first step makes the optimizer's state
        gc.collect()  # what FSDP2 has replaced lies in cycles, whose bytes would go in any later step

    def train(self, plan: Plan) -> None:
        """One step."""
        self._set(plan)
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

    def state_bytes(self) -> dict[str, int]:
        states = self.optimizer.state.values()
        return {
            "parameters": _bytes(self.model.parameters()),
            "optimizer state": _bytes(value for state in states for value in state.values()),
        }

    def _set(self, plan: Plan) -> None:
        """What the plan has that may change from step to step."""
        assert plan.layout == self._layout
        block: Any
        for block, forward in zip(self.model.blocks, self._forwards, strict=True):
            block.forward = _checkpointed(forward, plan.checkpoint)
            block.set_reshard_after_forward(plan.reshard_after_forward, recurse=False)


def _bytes(tensors: Any) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local if isinstance(t, torch.Tensor))


def _checkpointed(forward: Any, how: str) -> Any:
    if how == "none":
        return forward
    options = {"context_fn": _keep_every_second_product} if how == "selective" else {}
    return functools.partial(checkpoint, forward, use_reentrant=False, **options)


def _keep_every_second_product() -> Any:
    """torchtitan's selective checkpoints: what to keep of a block, besides its input."""
    products = {False: 0, True: 0}
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = func in kept
        if func is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
