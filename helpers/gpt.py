"""What ``notebooks/train.py`` knows about its model: sizes, and how tensor parallelism divides it."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from vgpu.plan.transformer import LETTERS, LLAMA

MODELS = {"letters": LETTERS, **LLAMA}
"""Sizes of a ``Transformer``: a small one to train here, and those of Llama 3.1."""

TENSOR_PLAN = {  # between the products, each rank has a part of every sequence: Shard(1)
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.*_norm": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "blocks.*.attention.[qkv]*": ColwiseParallel(),  # query, key, value
    "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.feed_forward": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    "blocks.*.feed_forward.[gu]*": ColwiseParallel(),  # gate, up
    "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}
"""For ``parallelize_module``, by module name; ``*`` matches any characters."""
