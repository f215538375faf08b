"""What ``notebooks/train.py`` knows about its model: sizes, its tensor parallelism, and its FLOPs."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from vgpu.plan.estimate import flop_per_token
from vgpu.plan.transformer import LETTERS, LLAMA, TransformerSizes

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

PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100 80GB HBM3": 989,  # SXM
    "A100": 312,
    "V100-SXM2": 125,
}
"""Dense 16-bit products, from NVIDIA's datasheets, by the first key that the GPU's name contains."""


def speed(tokens_per_s: float, sizes: TransformerSizes, device: str) -> str:
    """Tokens/s of all ranks; on a GPU its peak memory, on a real one model FLOPs utilization (MFU)."""
    text = f"{tokens_per_s:,.0f} tokens/s"
    if device != "cpu":
        text += f", {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB at the peak"
    if device == "cuda":
        name = torch.cuda.get_device_name()
        peaks = [tflops for gpu, tflops in PEAK_TFLOPS.items() if gpu in name and "MIG" not in name]
        if not peaks:
            return f"{text}, MFU unknown: PEAK_TFLOPS in helpers/gpt.py lacks {name}"
        flop_per_s = tokens_per_s / dist.get_world_size() * flop_per_token(sizes, sizes.sequence)
        text += f", MFU {flop_per_s / (peaks[0] * 1e12):.1%}"
    return text
