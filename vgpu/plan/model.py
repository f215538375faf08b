"""What a rank of a plan's cluster has of the model: divided by PyTorch's own code, only as shapes."""

import functools
import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from tqdm.auto import tqdm

import vgpu
from vgpu.plan.parallel import Stage, shard, share_tensors
from vgpu.plan.step import Plan
from vgpu.plan.transformer import Transformer
from vgpu.profiling.memory import frozen

SHOW_AFTER_S = 2.0
"""From here on a bar shows how far a prediction is."""

_NO_LIMIT_BYTES = 2**50  # a plan that does not fit is still counted


def progress(what: str, total: int, unit: str) -> Any:
    """A bar, shown if it takes long; of several processes that predict, their parent has one."""
    child = multiprocessing.parent_process() is not None
    return tqdm(desc=what, total=total, unit=unit, leave=False, delay=SHOW_AFTER_S, disable=child)


@contextmanager
def on_cluster(plan: Plan, rank: int | None = None) -> Iterator[vgpu.Cluster]:
    """In the block this process is a rank of the plan's cluster, and tensors are shapes.

    rank: by default the first of those whose groups are the slowest.
    """
    cluster = vgpu.cluster(
        plan.hosts,
        min(plan.gpus_per_host, plan.layout.ranks),
        gpu=plan.spec,
        network=plan.network,
        rank=plan.slowest().rank if rank is None else rank,
        memory_bytes=_NO_LIMIT_BYTES,
    )
    with cluster as made, vgpu.shapes_only():
        yield made


@contextmanager
def without_garbage() -> Iterator[None]:
    """What the block leaves in cycles is gone when it ends.

    FSDP2 replaces parameters, and the bytes of those before would go in the middle of any later step.
    What was there before the block is not gone through: that would take longer than the block.
    """
    with frozen():
        yield
        gc.collect()


class Divided:
    """A model, or a stage of one, as one rank has it; ``module`` is what FSDP2 made of it."""

    def __init__(self, model: Transformer | Stage, plan: Plan, mesh: DeviceMesh) -> None:
        """model: on the host. Of the whole a GPU need not have room for more than its own part."""
        if plan.layout.tensors > 1:
            share_tensors(model, mesh["tensors"])
        self._blocks = list(model.blocks)
        self._forwards = [block.forward for block in self._blocks]
        copies = ("replicas", "shards") if plan.layout.replicas > 1 else ("shards",)
        shard(
            model,
            self._blocks,
            mesh[copies],
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        self.module: Any = model.to("vgpu")

    def set(self, plan: Plan) -> None:
        """What the plan has that may change from step to step."""
        block: Any
        for block, forward in zip(self._blocks, self._forwards, strict=True):
            block.forward = _checkpointed(forward, plan.checkpoint)
            block.set_reshard_after_forward(plan.reshard_after_forward, recurse=False)


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What stays on this rank from step to step: its parts of parameters and optimizer state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = optimizer.state.values()
    return {
        "parameters": _bytes(parameters),
        "optimizer state": _bytes(value for state in states for value in state.values()),
    }


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
