"""Trainings that others measured, predicted: PyTorch's own FSDP2 as one rank of a virtual cluster.

Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (December 2024). Hosts of 8
H100 with 96 GB HBM2e (2.4 TB/s), NVLink inside, 400 Gb/s a GPU between them. Llama 3.1 8B, sequence
8192, 2 sequences a GPU, bfloat16 parameters, float32 reduction, AdamW, and checkpoints that keep
attention's outputs and every second matrix product.

One figure is fitted, to the first row: the share of the H100's peak that arithmetic reaches. All
else stands in datasheets or is CostModel's default. Not modelled, and so not here: rows with
torch.compile, asynchronous tensor parallelism and float8.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from helpers import vgpu
from helpers.models import LLAMA, Transformer

GPU = dataclasses.replace(
    vgpu.get_spec("H100"),
    name="Virtual H100 96GB HBM2e",
    memory_bytes=96 * 2**30,
    memory_bandwidth_bytes_per_s=2.4e12,
)
BATCH, SEQUENCE = 2, 8192


class Row(NamedTuple):
    hosts: int
    tokens_per_s: float  # of one GPU
    reserved_gib: float


ROWS = (Row(1, 5762, 82.4), Row(16, 5605, 67.0))


class Found(NamedTuple):
    seconds: float
    allocated_gib: float
    reserved_gib: float

    @property
    def tokens_per_s(self) -> float:
        return BATCH * SEQUENCE / self.seconds


def keep_every_second_product():
    """torchtitan's selective checkpoints: what to keep of a block, besides its input."""
    products = {False: 0, True: 0}
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }

    def policy(context, func, *args, **kwargs):
        keeps = func in kept
        if func is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def predicted(row: Row, share: float) -> Found:
    """The second step of rank 0, from the first launch to the last kernel's end."""
    with (
        vgpu.cluster(row.hosts, gpu=GPU, network="InfiniBand NDR") as cluster,
        vgpu.shapes_only(),
        vgpu.record_memory() as memory,
    ):
        model = Transformer(LLAMA["8B"]).to("vgpu")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            block.forward = functools.partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                context_fn=keep_every_second_product,
            )
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            tokens = torch.randint(100, (BATCH, SEQUENCE), device="vgpu")
            logits = model(tokens).flatten(0, 1).float()
            F.cross_entropy(logits, tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        torch.vgpu.reset_peak_memory_stats()
        with vgpu.record(arithmetic_share=share) as timeline:
            step()
        assert not timeline.races, timeline.races
        # torchtitan's run_train.sh sets expandable_segments:True.
        reserved = memory.reserved(cluster.device, expandable_segments=True)
        return Found(
            timeline.makespan_s,
            torch.vgpu.max_memory_allocated() / 2**30,
            reserved.peak_reserved_bytes / 2**30,
        )


def main() -> str:
    first = ROWS[0]
    share = vgpu.fit_share(
        lambda share: predicted(first, share).seconds, BATCH * SEQUENCE / first.tokens_per_s
    )
    lines = [
        "## Published trainings, predicted",
        "",
        "Llama 3.1 8B with FSDP2 on H100s (torchtitan, December 2024); how stands at the head of "
        f"`benchmarks/published.py`. Fitted to the first row: arithmetic reaches {share:.3f} of the "
        "peak. The trivial predictor gives every row the first row's tokens/s. Memory is what PyTorch's "
        "allocator reserves, from a replay of every allocation, beside what tensors take at most.",
        "",
        "| GPUs | tokens/s/GPU, published | predicted | error | trivial | GiB reserved, published | "
        "predicted | error | GiB allocated, predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = predicted(row, share)
        error = found.tokens_per_s / row.tokens_per_s - 1
        trivial = first.tokens_per_s / row.tokens_per_s - 1
        lines.append(
            f"| {8 * row.hosts} | {row.tokens_per_s:,.0f} | {found.tokens_per_s:,.0f} | "
            f"{error:+.1%} | {trivial:+.1%} | {row.reserved_gib} | {found.reserved_gib:.1f} | "
            f"{found.reserved_gib / row.reserved_gib - 1:+.1%} | {found.allocated_gib:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
