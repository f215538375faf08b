"""Predict runs with float8, context parallelism and experts that others measured.

Sources: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 to 4) and
asyncTP_llama3_h100_2025-06_torchtitan.md, on the H100s of ``published.py``: float8 with one scale
per tensor, torch.compile. NVIDIA-NeMo/Automodel, docs/performance-summary.md of October 2025 with
examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml: Qwen3 30B on eight H100s with 80 GB, FSDP2,
a router that keeps experts equally busy, full recomputation. That router is ``FakeBalancedGate`` in
nemo_automodel/components/moe/layers.py (at 89e3a9f), which gives a token eight consecutive experts,
all on one of the eight ranks; DeepEP sends a token once to each rank that has any of its experts.
Its attention is Transformer Engine's, which is cuDNN's on an H100 and about as fast as
FlashAttention-3 (vgpu/time/costs.py).

The one fitted figure is that of ``published.py``, from a row in bfloat16. Steps are extrapolated from four
and five layers. We leave out FSDP2's float8 all-gathers, and asynchronous float8 gathers that torch.compile
overlaps with matmuls. For Qwen3, we also leave out the norms of queries and keys, and the kernels of
Transformer Engine and DeepEP; elementwise operations are fused here instead. No two ranks share an
expert, so NeMo AutoModel keeps experts in bfloat16, unsharded; here, they are cast from float32 for
each forward and backward.
"""

from collections import defaultdict
from typing import NamedTuple

from benchmarks._order import mean
from benchmarks.published import FITTED, GPU, SPREAD, fitted_share
from vgpu.plan import Layout, Plan, estimate, extrapolate
from vgpu.plan.transformer import LLAMA, ExpertSizes, TransformerSizes


class Row(NamedTuple):
    name: str
    plan: Plan
    tokens_per_s: float  # per GPU
    async_tokens_per_s: float | None = None
    attention: str = "flash 2"


def _on_a_line(first: float, second: float, times: int) -> float:
    """Extrapolate tokens/s to ``times`` the first length, with seconds per token linear in the length."""
    return 1 / (1 / first + (times - 1) * (1 / second - 1 / first))


_SHORT, _TWICE, _FOUR_TIMES, _EIGHT_TIMES = (
    3890,
    2540,
    1071,
    548,
)  # 8B, by length, from 32,768 tokens on
_LARGE = 76, 47, 31, 16  # 405B in table 6, by the same lengths, with tp 8 and pp 8
_WHY = (
    "The predicted gain of asynchronous tensor parallelism with float8 is too small, since only "
    "reduce-scatters are split into pieces here, not gathers.\n\nThe two longest sequences are "
    "unexplained: no model in which attention's work grows with the length could match both them "
    "and the other two. If the seconds per token kept growing beyond 65,536 tokens as they do up "
    f"to there, the speed would be {_on_a_line(_SHORT, _TWICE, 4):,.0f} tokens/s at 131,072 and "
    f"{_on_a_line(_SHORT, _TWICE, 8):,.0f} at 262,144; {_FOUR_TIMES:,} and {_EIGHT_TIMES} were "
    "published. Context parallelism isn't slow in itself: in table 6 of torchtitan's "
    f"llama3_h100_202412_torchtitan.md, 405B on 512 GPUs of the same kind reaches {_LARGE[2]} and "
    f"{_LARGE[3]} tokens/s at these lengths, where its first two figures, {_LARGE[0]} and "
    f"{_LARGE[1]}, would give {_on_a_line(*_LARGE[:2], 4):.0f} and "
    f"{_on_a_line(*_LARGE[:2], 8):.0f}. The prediction follows torchtitan's default at 9dec370, "
    "the commit that is named in that file (keys and values are gathered, and each rank has a "
    "chunk from the start and one from the end); whether the published runs did the same isn't "
    "stated. Without such balancing, the last of 4 or 8 ranks takes 1.75 or 1.88 times the mean, "
    "which is about what attention took in these two rows; but the last of 2 takes 1.5 times, and "
    "attention took 1.2 times in that row. In the two shorter rows, a fifth to a third of "
    "attention's time is missing from the prediction: their GPUs were limited to 500 W, and the "
    "speed of FlashAttention-2 was measured on others.\n\nThe GPUs of Qwen3's row weren't limited "
    "to 500 W, unlike those of the row that arithmetic is fitted to."
)


def _llama(model: str, layout: Layout, batch: int, recompute: str, sequence: int = 8192) -> Plan:
    return Plan(LLAMA[model], layout, batch, sequence, recompute, gpu=GPU, float8=True)


def _shared(dp_shard: int, cp: int, tokens_per_s: float) -> Row:
    sequence = 32_768 * cp
    plan = _llama("8B", Layout(dp_shard=dp_shard, cp=cp), 1, "full", sequence)
    return Row(f"8B, float8, {sequence:,} tokens", plan, tokens_per_s)


QWEN3 = TransformerSizes(
    48,
    2048,
    32,
    4,
    6144,
    151_936,
    head_size=128,
    experts=ExpertSizes(128, 8, 768, ranks_per_token=1),
)
ROWS = (
    Row("8B, float8", _llama("8B", Layout(dp_shard=8), 2, "selective"), 8532),
    Row("8B, float8", _llama("8B", Layout(dp_shard=128), 2, "selective"), 8380),
    Row("8B, float8", _llama("8B", Layout(dp_shard=8, tp=8), 12, "selective"), 5078.1, 5570.1),
    Row("70B, float8", _llama("70B", Layout(dp_shard=32, tp=8), 16, "full"), 809.8, 942.4),
    _shared(8, 1, _SHORT),
    _shared(4, 2, _TWICE),
    _shared(2, 4, _FOUR_TIMES),
    _shared(1, 8, _EIGHT_TIMES),
    Row(
        "Qwen3 30B, 8 of 128 experts",
        Plan(QWEN3, Layout(dp_shard=8, ep=8), 4, 4096, "full", accumulate=16),
        12_040,
        attention="flash 3",
    ),
)


def _kind(row: Row) -> str:
    if row.plan.sizes.experts:
        return "experts"
    return "long sequences" if row.plan.sequence > 8192 else "float8"


def main() -> str:
    costs = {"arithmetic_share": fitted_share(), "speed_spread": SPREAD}
    fitted_flop = FITTED.tokens_per_s * FITTED.flop_per_token
    lines = [
        "## Float8, context parallelism and experts, predicted",
        "",
        "These are runs of Llama 3.1 with float8 matmuls and torch.compile (torchtitan), and of "
        "Qwen3 30B (NeMo AutoModel); the docstring of `benchmarks/published_methods.py` explains "
        "the method. Nothing is fitted to these rows: arithmetic reaches "
        f"{costs['arithmetic_share']:.3f} of the peak, even in float8, as fitted to the first of "
        "the published training runs above. The trivial predictor gives every row that run's "
        "FLOP/s.",
        "",
        "| model | GPUs | layout, batch, recompute | tokens/s/GPU, published | predicted | error | trivial |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in ROWS:
        step = extrapolate(row.plan, **costs, fuses=True, attention=row.attention)
        pairs = [("", row.tokens_per_s, step.tokens_per_s())]
        if row.async_tokens_per_s is not None:
            pairs.append((", async_tp", row.async_tokens_per_s, step.tokens_per_s(async_tp=True)))
        plan = row.plan
        trivial = fitted_flop / estimate.flop_per_token(plan.sizes, plan.sequence)
        for how, published, predicted in pairs:
            error, of_trivial = predicted / published - 1, trivial / published - 1
            errors[_kind(row)].append((error, of_trivial))
            lines.append(
                f"| {row.name} | {plan.layout.ranks} | {plan.layout}, {plan.batch}, "
                f"{plan.recompute}{how} | {published:,.0f} | {predicted:,.0f} | "
                f"{error:+.1%} | {of_trivial:+.1%} |"
            )
    means = (
        f"{kind} {mean(ours):.1%} (trivial: {mean(trivial):.1%})"
        for kind, each in errors.items()
        for ours, trivial in [zip(*each, strict=True)]
    )
    lines += ["", f"The mean errors are: {'; '.join(means)}.", "", _WHY]
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
