"""Predict FSDP training runs that others measured: MosaicML's MPT, and IBM's Llama 2.

Sources: mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48 (about half of its H100 rows
are in ``rows/mpt_h100.csv``); foundation-model-stack/fms-fsdp, README at 5a296af. ``python -m
benchmarks.published_fsdp FILE.csv`` runs on another file in llm-foundry's format, with one GPU model.

MPT has GELU, learned positions, LayerNorm in 16 bits and a vocabulary of 50,368, and wasn't
compiled. We assume that "DEFAULT" reduces gradients in float32 and "PURE" in bfloat16. Its
attention is the first generation of FlashAttention, in Triton (attn_impl in
scripts/train/benchmarking/submit_benchmarks.py; sweep.py in the same folder uses the CUDA version
of that time for some models). Rows in fp8 are left out. The network of the H100s isn't stated, so
we assume 400 Gb/s per GPU; A100s had 1,600 Gb/s of RoCE per host.

IBM used 128 A100s with 80 GB and 400 Gb/s per host, sequence length 4096, batch 2, torch.compile and bfloat16
reduction. Its rotary embeddings use real numbers, which can be fused; ours are complex and can't be.

One figure is fitted in each table, to the row named there: the efficiency of arithmetic. How much
GPUs vary was measured elsewhere (SPREAD). NCCL's kernels take two multiprocessors per network
adapter of the host from the kernels that they run alongside (CostModel.collective_processors has
the source).
"""

import csv
import sys
from pathlib import Path
from typing import NamedTuple

import vgpu
from benchmarks._order import mean, order
from benchmarks.published import SPREAD
from vgpu.plan import Layout, Plan, estimate, extrapolate
from vgpu.plan.megatron import GPU as A100_80
from vgpu.plan.transformer import TransformerSizes

ROWS = Path(__file__).parent / "rows" / "mpt_h100.csv"
MPT = {  # layers, width, heads
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
GPUS = {  # keys: the first word of llm-foundry's names, which ends with the memory in GB
    "h100_80gb": (vgpu.get_spec("H100"), "InfiniBand NDR"),
    "a100_80gb": (A100_80, "InfiniBand HDR"),  # 200 Gb/s per GPU, like their RoCE
    "a100_40gb": (vgpu.get_spec("A100"), "InfiniBand HDR"),
}
FITTED = (
    "7b",
    2048,
    8,
)  # model, sequence length and GPUs of the row; otherwise, the file's first row


class Row(NamedTuple):
    name: str
    plan: Plan
    tokens_per_s: float  # per GPU


class Predicted(NamedTuple):
    row: Row
    tokens_per_s: float
    trivial: float

    @property
    def error(self) -> float:
        return self.tokens_per_s / self.row.tokens_per_s - 1


def read(path: Path) -> list[Row]:
    """Return the rows of an llm-foundry file, without those in fp8."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(row) for row in csv.DictReader(file) if "fp8" not in row["Precision"]]


def _row(row: dict[str, str]) -> Row:
    name, sequence = row["Model"], int(row["SeqLen (T)"])
    layers, width, heads = MPT[name]
    gpu, network = GPUS[row["GPU"]]
    plan = Plan(
        TransformerSizes(layers, width, heads, heads, 4 * width, 50_368, sequence, form="gpt"),
        Layout(dp_shard=int(row["# GPUs"])),
        int(row["MicroBatchSize"]),
        sequence,
        "full" if row["Activation Checkpointing"] == "True" else "none",
        reshard_after_forward=row["Sharding Strategy"] == "FULL_SHARD",
        gpu=gpu,
        network=network,
        accumulate=int(row["GradAccum"]),
        reduce="float32" if row["MP Mode"] == "DEFAULT" else "bfloat16",
    )
    return Row(name, plan, float(row["Throughput (T/s/GPU)"]))


def _llama_2(name: str, feed_forward: int, key_value_heads: int) -> TransformerSizes:
    layers, width, heads = {**MPT, "34b": (48, 8192, 64)}[name]
    return TransformerSizes(layers, width, heads, key_value_heads, feed_forward, 32_000, 4096)


def _ibm(sizes: TransformerSizes, layout: Layout, recompute: str, every: int = 1) -> Plan:
    return Plan(
        sizes,
        layout,
        2,
        4096,
        recompute,
        recompute_every=every,
        gpu=A100_80,
        network="EFA p4d",  # four adapters of 100 Gb/s per host, as here
        reduce="bfloat16",
    )


_SHARDED = Layout(dp_shard=128)
IBM = [
    Row("7B", _ibm(_llama_2("7b", 11_008, 32), Layout(16, 8), "none"), 4550),
    # Selective: IBM recomputed a fraction of about 0.39 of the blocks; here, it's every third block.
    Row("13B", _ibm(_llama_2("13b", 13_824, 40), _SHARDED, "full", 3), 2150),
    Row("34B", _ibm(_llama_2("34b", 22_016, 8), _SHARDED, "full"), 820),
    Row("70B", _ibm(_llama_2("70b", 28_672, 8), _SHARDED, "full"), 410),
]


def flop_per_token(plan: Plan) -> float:
    """Return FLOPs per token, including recomputation and the full, unmasked scores."""
    flop = estimate.flop_per_token(plan.sizes, plan.sequence)
    return flop * (1 + 1 / 3 / plan.recompute_every) if plan.recompute == "full" else flop


def _processors(plan: Plan) -> int:
    adapters = vgpu.NETWORKS[plan.network].adapters_per_host
    return 2 * (plan.gpus_per_host if adapters is None else adapters)


def predicted(rows: list[Row], fitted: Row, **costs: object) -> tuple[list[Predicted], float]:
    """Predict each row with the arithmetic efficiency that matches the fitted row; return that, too."""
    steps = [
        extrapolate(
            row.plan, speed_spread=SPREAD, collective_processors=_processors(row.plan), **costs
        )
        for row in rows
    ]
    plan = fitted.plan
    step = steps[rows.index(fitted)]
    share = vgpu.fit_share(
        lambda share: step.seconds(arithmetic_share=share),
        plan.tokens / plan.layout.ranks / fitted.tokens_per_s,
    )
    flop_per_s = fitted.tokens_per_s * flop_per_token(plan)
    return [
        Predicted(
            row, step.tokens_per_s(arithmetic_share=share), flop_per_s / flop_per_token(row.plan)
        )
        for row, step in zip(rows, steps, strict=True)
    ], share


def main(path: Path = ROWS) -> str:
    rows = read(path)
    found = [row for row in rows if (row.name, row.plan.sequence, row.plan.layout.ranks) == FITTED]
    mpt = _table(rows, (found or rows)[0], attention="triton")
    return "\n".join(
        [
            "## FSDP training runs, predicted",
            "",
            "The tables give tokens/s per GPU; the docstring of `benchmarks/published_fsdp.py` explains the "
            "method. The trivial predictor gives every row the fitted row's FLOP/s, including recomputation. "
            + _SEEN,
            "",
            f"MPT (llm-foundry), {path.stem}:",
            "",
            *mpt,
            "",
            _WHY,
            "",
            "IBM's Llama 2 (fms-fsdp):",
            "",
            *_table(IBM, IBM[-1], fuses=True),
        ]
    )


_SEEN = (
    "The model's other figures (the speed of Triton's attention on an H100, what NCCL's kernels take from "
    "those that run alongside, and which row is fitted) were chosen with these rows in view, so these "
    "aren't errors on unseen rows."
)
_WHY = (
    "The largest error, for 30b with sequence length 8192 on eight GPUs, is unexplained. "
    "Parameters, gradients and optimizer state take 60 of the 80 GB there, so PyTorch's allocator "
    "may have had to free memory and request it again. From 128 to 512 GPUs, 3b lost 7.5%. The "
    "slowest GPU and the multiprocessors that NCCL takes explain a third of that. A latency of 40 "
    "µs per step of the ring would explain another third, but it isn't in the model: it's ten "
    "times NCCL's own figure, although the all-gathers of the Ultra-Scale Playbook agree with it "
    "(250 GB/s on one host and 11 on 64 hosts correspond to 38 µs per step and a bandwidth of 300 "
    "GB/s). The rest may come from slow hosts (in MegaScale, Jiang et al., 2024, 0.5% of the hosts are 10% slower)."
)


def _table(rows: list[Row], fitted: Row, **costs: object) -> list[str]:
    found, share = predicted(rows, fitted, **costs)
    errors = [each.error for each in found]
    trivial = [each.trivial / each.row.tokens_per_s - 1 for each in found]
    ordered = order(
        [each.row.tokens_per_s for each in found], [each.tokens_per_s for each in found]
    )
    lines = [
        f"Fitted to {fitted.name} with sequence length {fitted.plan.sequence} on "
        f"{fitted.plan.layout.ranks} GPUs, arithmetic reaches {share:.3f} of the peak. The mean error is "
        f"{mean(errors):.1%}; the trivial predictor's is {mean(trivial):.1%}. {ordered}",
        "",
        "| model | sequence length | GPUs | batch | recompute | published | predicted | error | trivial |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each, error, other in zip(found, errors, trivial, strict=True):
        plan = each.row.plan
        batch = f"{plan.batch}" + (f" × {plan.accumulate}" if plan.accumulate > 1 else "")
        again = "" if plan.recompute == "none" else plan.recompute
        lines.append(
            f"| {each.row.name} | {plan.sequence} | {plan.layout.ranks} | {batch} | {again} | "
            f"{each.row.tokens_per_s:,.0f} | {each.tokens_per_s:,.0f} | {error:+.1%} | {other:+.1%} |"
        )
    return lines


if __name__ == "__main__":
    print(main(*map(Path, sys.argv[1:])))
