"""A transformer divided among ranks, by PyTorch's own FSDP2, tensor parallelism and recomputation.

The same lines serve ranks that exist, under ``launch.run`` or torchrun, and a rank of
``vgpu.cluster``.
"""

import dataclasses
import functools
import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from vgpu.plan.layout import Layout, StageLayers
from vgpu.plan.transformer import Transformer, TransformerSizes
from vgpu.plan.workers import progress

RECOMPUTE = ("none", "selective", "full")
"""What of a block backward computes again: nothing, all but attention and every second matrix
product (torchtitan's "selective op"), or everything (activation checkpointing)."""


class TransformerStage(nn.Module):
    """A pipeline stage of a transformer, for sequences of exactly ``sizes.sequence`` tokens.

    (B, S) integers in for the first stage, else (B, S, width); (B, S, vocabulary) logits out of the
    last stage, else (B, S, width). With tensor parallelism, S between stages is a rank's part.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: TransformerSizes, part: StageLayers) -> None:
        super().__init__()
        whole = Transformer(dataclasses.replace(sizes, layers=part.layers))
        self.embedding = whole.embedding if part.first else None
        self.blocks = whole.blocks
        self.norm = whole.norm if part.last else None
        self.output = whole.output if part.last else None
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden, self.cos, self.sin)
        if self.norm is None or self.output is None:
            return hidden
        return self.output(self.norm(hidden))


def apply_tp(model: Transformer | TransformerStage, mesh: DeviceMesh) -> None:
    """Divide each layer among the ranks of a mesh of one dimension, in place.

    Between the layers each rank holds a part of every sequence (sequence parallelism, Korthikanti
    et al., 2022). The logits stay divided by vocabulary: compute the loss in ``loss_context``.
    """
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    here = {name: style for name, style in plan.items() if getattr(model, name) is not None}
    if here:  # a stage in the middle has blocks only
        parallelize_module(model, mesh, here)
    whole = (Replicate(), None, None)
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None), desired_input_layouts=whole
                ),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.output": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def loss_context(layout: Layout) -> AbstractContextManager[None]:
    """For the loss and its backward: with tensor parallelism, the logits are never gathered."""
    return loss_parallel() if layout.tp > 1 else nullcontext()


def apply_fsdp(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """FSDP2 for the whole model and for each of its blocks, which are gathered one after another.

    The mesh has one dimension, or two for shards inside replicas (HSDP).
    """
    policy = policy or MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class ParallelModel:
    """A model, or a stage of one, as one virtual rank has it; ``module`` is what FSDP2 made of it.

    Parameters are gathered in bfloat16, and gradients reduced in float32.
    """

    def __init__(
        self, model: Transformer | TransformerStage, layout: Layout, mesh: DeviceMesh
    ) -> None:
        """model: on the host. Of the whole a GPU need not have room for more than its own part."""
        if layout.tp > 1:
            apply_tp(model, mesh["tp"])
        self._blocks = list(model.blocks)
        self._forwards = [block.forward for block in self._blocks]
        dp = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # With thousands of shards this is what takes minutes.
        blocks = progress("sharding blocks", "block", items=self._blocks)
        apply_fsdp(model, blocks, mesh[dp], policy)
        self.module: Any = model.to("vgpu")

    def configure(self, recompute: str, reshard_after_forward: bool) -> None:
        """Set what may change from step to step: one of ``RECOMPUTE``, and FSDP2's option."""
        block: Any
        for block, forward in zip(self._blocks, self._forwards, strict=True):
            block.forward = _recomputed(forward, recompute)
            block.set_reshard_after_forward(reshard_after_forward, recurse=False)


def _recomputed(forward: Any, recompute: str) -> Any:
    if recompute == "none":
        return forward
    options: dict[str, Any] = (
        {"context_fn": _keep_every_second_product} if recompute == "selective" else {}
    )
    return functools.partial(checkpoint, forward, use_reentrant=False, **options)


def _keep_every_second_product() -> Any:
    """torchtitan's selective activation checkpointing: what to keep of a block, besides its input."""
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


@contextmanager
def without_garbage() -> Iterator[None]:
    """What the block leaves in cycles is gone when it ends.

    FSDP2 replaces parameters, and the bytes of those before would go in the middle of any later step.
    With automatic collection off, all new objects are in the youngest generation: to collect that
    one is quick, where a full collection goes through all of torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect(0)
    finally:
        if was_enabled:
            gc.enable()


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What stays on this rank from step to step: its parts of parameters and optimizer state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = optimizer.state.values()
    return {
        "parameters": _local_bytes(parameters),
        "optimizer state": _local_bytes(value for state in states for value in state.values()),
    }


def _local_bytes(tensors: Iterable[Any]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local if isinstance(t, torch.Tensor))
