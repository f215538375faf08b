"""Trainings that others measured, predicted: PyTorch's own parallel code as one rank of a cluster.

Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-
06_torchtitan.md. Hosts of 8 H100 with 96 GB HBM2e (2.4 TB/s), NVLink inside, 400 Gb/s a GPU between
them. Llama 3.1, sequence 8192, bfloat16 parameters, float32 reduction, AdamW; FSDP2, and tensor
parallelism with sequence parallelism and a loss of parts, as torchtitan applies them. Checkpoints
keep attention's outputs and every second matrix product of a block, or only the block's input.

One figure is fitted, to the first row: the share of the H100's peak that arithmetic reaches. All
else stands in datasheets or is CostModel's default. Not modelled, and so not here: float8.
"""

import dataclasses
import functools
import time
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks._order import order
from helpers import vgpu
from helpers.models import LLAMA, Transformer

GPU = dataclasses.replace(
    vgpu.get_spec("H100"),
    name="Virtual H100 96GB HBM2e",
    memory_bytes=96 * 2**30,
    memory_bandwidth_bytes_per_s=2.4e12,
)
SEQUENCE = 8192


class Row(NamedTuple):
    model: str
    gpus: int
    tensor_parallel: int
    batch: int  # of the GPUs that share a tensor
    checkpoints: str  # "selective" or "full"
    compiled: bool
    tokens_per_s: float  # of one GPU
    reserved_gib: float | None = None

    @property
    def layout(self) -> str:
        shards = f"FSDP {self.gpus // self.tensor_parallel}"
        tensor = f" × TP {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{shards}{tensor}, {self.batch}, {self.checkpoints}"

    @property
    def tokens(self) -> float:
        """Of one GPU in a step."""
        return self.batch * SEQUENCE / self.tensor_parallel

    @property
    def flop_per_token(self) -> float:
        """Of the model, forward and backward, without what is computed again."""
        sizes = LLAMA[self.model]
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in Transformer(sizes).parameters())
        products = weights - sizes.vocabulary * sizes.width
        return 6 * products + 6 * sizes.layers * sizes.width * SEQUENCE


ROWS = (
    Row("8B", 8, 1, 2, "selective", False, 5762, 82.4),
    Row("8B", 8, 1, 2, "selective", True, 6667, 77.0),
    Row("8B", 128, 1, 2, "selective", False, 5605, 67.0),
    Row("8B", 128, 1, 2, "selective", True, 6514, 62.0),
    Row("8B", 64, 8, 12, "selective", True, 4378),
    # Its memory was published with float8 only, which takes 0.2 GiB less in the rows of 8B.
    Row("70B", 256, 8, 16, "full", True, 597, 71.9),
)
FITTED = ROWS[0]


class Found(NamedTuple):
    tokens_per_s: float
    allocated_gib: float
    reserved_gib: float


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


def split_tensors(model: Transformer, mesh: DeviceMesh) -> None:
    """torchtitan's plan for Llama: what lies between the products is split along the sequence."""
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    outside = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    inside = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), columns),
        "attention.output": rows,
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        **dict.fromkeys(("feed_forward.gate", "feed_forward.up"), columns),
        "feed_forward.down": rows,
    }
    parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)


def parallel_model(row: Row) -> Transformer:
    """The row's model, on the current rank of its cluster."""
    sizes = (row.gpus // row.tensor_parallel, row.tensor_parallel)
    mesh = init_device_mesh("vgpu", sizes, mesh_dim_names=("dp", "tp"))
    model = Transformer(LLAMA[row.model])
    if row.tensor_parallel > 1:
        split_tensors(model, mesh["tp"])
    options = {"context_fn": keep_every_second_product} if row.checkpoints == "selective" else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        fully_shard(block, mp_policy=policy, mesh=mesh["dp"])
    fully_shard(model, mp_policy=policy, mesh=mesh["dp"])
    return model.to("vgpu")


def recorded(row: Row, **changes: float) -> tuple[vgpu.Timeline, float, float]:
    """The second step of rank 0, and the most GiB that are allocated and reserved.

    changes: fields of CostModel.
    """
    with (
        vgpu.cluster(row.gpus // 8, gpu=GPU, network="InfiniBand NDR") as cluster,
        vgpu.shapes_only(),
        vgpu.record_memory() as memory,
    ):
        model = parallel_model(row)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            tokens = torch.randint(100, (row.batch, SEQUENCE), device="vgpu")
            with loss_parallel():
                # Nothing but the loss holds the logits during the backward pass.
                F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        torch.vgpu.reset_peak_memory_stats()
        with vgpu.record(fuses=row.compiled, **changes) as timeline:
            step()
        assert not timeline.races, timeline.races
        # torchtitan's run_train.sh sets expandable_segments:True.
        reserved = memory.reserved(cluster.device, expandable_segments=True)
        allocated_bytes = torch.vgpu.max_memory_allocated()
    return timeline, allocated_bytes / 2**30, reserved.peak_reserved_bytes / 2**30


def predicted(row: Row, share: float) -> Found:
    """From the step's first launch to its last kernel's end."""
    timeline, allocated_gib, reserved_gib = recorded(row, arithmetic_share=share)
    return Found(row.tokens / timeline.makespan_s, allocated_gib, reserved_gib)


def fitted_share() -> float:
    """The share of arithmetic's peak at which the fitted row is met."""
    timeline, *_ = recorded(FITTED)
    return vgpu.fit_share(
        lambda share: vgpu.replay(timeline, arithmetic_share=share).makespan_s,
        FITTED.tokens / FITTED.tokens_per_s,
    )


def main() -> str:
    share = fitted_share()
    lines = [
        "## Published trainings, predicted",
        "",
        "Llama 3.1 with PyTorch's own FSDP2 and tensor parallelism on H100s (torchtitan, December "
        "2024 and June 2025); how stands at the head of `benchmarks/published.py`. Fitted to the "
        f"first row: arithmetic reaches {share:.3f} of the peak. The trivial predictor gives every "
        "row the first row's FLOP/s. Memory is what PyTorch's allocator reserves, from a replay of "
        "every allocation, beside what tensors take at most.",
        "",
        "| model | GPUs | layout, batch, checkpoints | compile | tokens/s/GPU, published | predicted "
        "| error | trivial | GiB reserved, published | predicted | error | GiB allocated, predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [(row, predicted(row, share)) for row in ROWS]
    for row, found in rows:
        trivial = FITTED.tokens_per_s * FITTED.flop_per_token / row.flop_per_token
        reserved = f"{row.reserved_gib}" if row.reserved_gib else ""
        error = f"{found.reserved_gib / row.reserved_gib - 1:+.1%}" if row.reserved_gib else ""
        lines.append(
            f"| {row.model} | {row.gpus} | {row.layout} | {'yes' if row.compiled else ''} | "
            f"{row.tokens_per_s:,.0f} | {found.tokens_per_s:,.0f} | "
            f"{found.tokens_per_s / row.tokens_per_s - 1:+.1%} | "
            f"{trivial / row.tokens_per_s - 1:+.1%} | {reserved} | {found.reserved_gib:.1f} | "
            f"{error} | {found.allocated_gib:.1f} |"
        )
    of_8b = [(row.tokens_per_s, found.tokens_per_s) for row, found in rows if row.model == "8B"]
    lines += ["", f"Of 8B, {order(*zip(*of_8b, strict=True))}", "", _own_time()]
    return "\n".join(lines)


def _own_time() -> str:
    """What the prediction of two steps and their memory costs this machine."""
    begin_s = time.process_time()
    recorded(Row("8B", 512, 1, 2, "selective", False, 0.0))
    return (
        f"8B as one of 512, two steps of which one is recorded, took {time.process_time() - begin_s:.1f} "
        "s of one core here, the model and the replay of its memory included."
    )


if __name__ == "__main__":
    print(main())
