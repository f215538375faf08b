"""A transformer divided among ranks, by PyTorch's own FSDP2 and tensor parallelism.

The same lines serve ranks that exist, under ``launch.run`` or torchrun, and a rank of
``vgpu.cluster``.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from vgpu.plan.parallel.layout import Layout
from vgpu.plan.parallel.stages import Stage
from vgpu.plan.transformer import Transformer


def share_tensors(model: Transformer | Stage, mesh: DeviceMesh) -> None:
    """Divide each layer among the ranks of a mesh of one dimension, in place.

    Between the layers each rank holds a part of every sequence (sequence parallelism, Korthikanti
    et al., 2022). The logits stay divided by vocabulary: the loss belongs into ``loss_context``.
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
    """For the loss and its backward: where tensors are shared, the logits are never gathered."""
    return loss_parallel() if layout.tensors > 1 else nullcontext()


def shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """FSDP2 for the whole model and for each of its units, which are gathered one after another.

    The mesh has one dimension, or two for shards inside copies (HSDP).
    """
    policy = policy or MixedPrecisionPolicy()
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
