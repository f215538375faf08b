"""What of a block backward computes again: activation checkpointing, as torchtitan applies it."""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def recomputed(forward: Any, recompute: str) -> Any:
    """A block's forward, of which backward computes again what ``recompute`` says (``RECOMPUTE``)."""
    if recompute == "none":
        return forward
    options: dict[str, Any] = (
        {"context_fn": _keep_every_second_product} if recompute == "selective" else {}
    )
    return functools.partial(checkpoint, forward, use_reentrant=False, **options)


def _keep_every_second_product() -> Any:
    """torchtitan's selective activation checkpointing: what to keep of a block, besides its input."""
    products = {False: 0, True: 0}
    multiplies = {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default}
    kept = {
        torch.ops.aten.amax.default,  # of what is cast to float8
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = func in kept
        if func in multiplies:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
