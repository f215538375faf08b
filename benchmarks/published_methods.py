"""Float8, shared sequences and experts as others measured them, predicted.

Sources: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 to 4) and
asyncTP_llama3_h100_2025-06_torchtitan.md, on the H100s of ``published.py``: float8 with one scale a
tensor, torch.compile. NVIDIA-NeMo/Automodel, docs/performance-summary.md of October 2025 with
examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml: Qwen3 30B on eight H100s with 80 GB, FSDP2, a
router that keeps experts equally busy, full recomputation.

The one fitted figure is that of ``published.py``, from a row in bfloat16. Steps are extrapolated
from four and five layers. Left out: float8 that FSDP2 gathers; asynchronous gathers of float8 that
torch.compile overlaps with products; of Qwen3 the norms of queries and keys, and the kernels of Transformer
Engine and DeepEP; for what they fuse, elementwise operations are fused here.
"""

from typing import NamedTuple

from benchmarks.published import FITTED, GPU, SPREAD, fitted_share
from vgpu.plan import Layout, Plan, estimate, extrapolate
from vgpu.plan.experts import ExpertSizes
from vgpu.plan.transformer import LLAMA, TransformerSizes


class Row(NamedTuple):
    name: str
    plan: Plan
    tokens_per_s: float  # of one GPU
    async_tokens_per_s: float | None = None


_UNEXPLAINED = (
    "Asynchronous tensor parallelism gains too little with float8, since only its reduce-scatters run in "
    "pieces here, and its gathers do not. The two longest sequences are unexplained: their attention took 1.7 "
    "times what is predicted, which is what the last of 4 or 8 ranks would take if sequences were cut "
    "without balance, 1.75 and 1.88 times; but two ranks took 1.2 times only, and one 1.3. In TFLOP/s of "
    "attention, if all else takes what it takes with 32,768 tokens: about 305 with two ranks, 195 with four and 185 "
    "with eight, where FlashAttention-2 was measured at 335 over long sequences, and longer ones make no kernel "
    "slower. The table doesn't say how keys and values went round, or whether sequences were balanced. Of Qwen3 "
    "several things are known: DeepEP sends a token once to each rank that has any of its eight "
    "experts, 5.3 of 8 ranks on average, where this sends it eight times; Transformer Engine's attention is "
    "cuDNN's; and those GPUs were not held to 500 W, as those were that the figure is fitted on."
)


def _llama(model: str, layout: Layout, batch: int, recompute: str, sequence: int = 8192) -> Plan:
    return Plan(LLAMA[model], layout, batch, sequence, recompute, gpu=GPU, float8=True)


def _shared(dp_shard: int, cp: int, tokens_per_s: float) -> Row:
    sequence = 32_768 * cp
    plan = _llama("8B", Layout(dp_shard=dp_shard, cp=cp), 1, "full", sequence)
    return Row(f"8B, float8, {sequence:,} tokens", plan, tokens_per_s)


QWEN3 = TransformerSizes(
    48, 2048, 32, 4, 6144, 151_936, head_size=128, experts=ExpertSizes(128, 8, 768)
)
ROWS = (
    Row("8B, float8", _llama("8B", Layout(dp_shard=8), 2, "selective"), 8532),
    Row("8B, float8", _llama("8B", Layout(dp_shard=128), 2, "selective"), 8380),
    Row("8B, float8", _llama("8B", Layout(dp_shard=8, tp=8), 12, "selective"), 5078.1, 5570.1),
    Row("70B, float8", _llama("70B", Layout(dp_shard=32, tp=8), 16, "full"), 809.8, 942.4),
    _shared(8, 1, 3890),
    _shared(4, 2, 2540),
    _shared(2, 4, 1071),
    _shared(1, 8, 548),
    Row(
        "Qwen3 30B, 8 of 128 experts",
        Plan(QWEN3, Layout(dp_shard=8, ep=8), 4, 4096, "full", accumulate=16),
        12_040,
    ),
)


def main() -> str:
    costs = {"arithmetic_share": fitted_share(), "speed_spread": SPREAD}
    fitted_flop = FITTED.tokens_per_s * FITTED.flop_per_token
    lines = [
        "## Float8, shared sequences and experts, predicted",
        "",
        "Llama 3.1 with float8 products and torch.compile (torchtitan), and Qwen3 30B (NeMo AutoModel); "
        "how stands at the head of `benchmarks/published_methods.py`. Nothing is fitted here: arithmetic "
        f"reaches {costs['arithmetic_share']:.3f} of the peak, float8's too, as in the first row of the "
        "table of published training runs. The trivial predictor gives every row that row's FLOP/s.",
        "",
        "| model | GPUs | layout, batch, recompute | tokens/s/GPU, published | predicted | error | trivial |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = []
    for row in ROWS:
        step = extrapolate(row.plan, **costs, fuses=True)
        pairs = [("", row.tokens_per_s, step.tokens_per_s())]
        if row.async_tokens_per_s is not None:
            pairs.append((", async_tp", row.async_tokens_per_s, step.tokens_per_s(async_tp=True)))
        plan = row.plan
        trivial = fitted_flop / estimate.flop_per_token(plan.sizes, plan.sequence)
        for how, published, predicted in pairs:
            errors.append((abs(predicted / published - 1), abs(trivial / published - 1)))
            lines.append(
                f"| {row.name} | {plan.layout.ranks} | {plan.layout}, {plan.batch}, "
                f"{plan.recompute}{how} | {published:,.0f} | {predicted:,.0f} | "
                f"{predicted / published - 1:+.1%} | {trivial / published - 1:+.1%} |"
            )
    mean, of_trivial = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    lines += [
        "",
        f"Mean error {mean:.1%}; of the trivial predictor {of_trivial:.1%}.",
        "",
        _UNEXPLAINED,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
