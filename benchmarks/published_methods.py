"""Predict runs with context parallelism and experts that others measured.

Source of the rows with context parallelism on B200s: MooreThreads/SimuMax at 4dcaae5,
docs/b200/b200_release_v1.2_summary.md (``real ms``), with simu_tools/megatron_scripts/scripts/
run_pretrain_llama3.sh: Megatron-LM with 12 layers of Llama 3 70B or 4 of 405B (with 16 key-value heads;
Meta's has 8), 4 micro-batches of one sequence, bfloat16, no recomputation, no overlap. These are all
rows with context parallelism, and one without. Megatron-LM's all-to-alls swap parts of a sequence for heads; here, keys and values
are gathered.

Source of DeepSeek on B200s: the same, with run_pretrain_deepseekv2.sh: all rows with experts. Models have four
layers, one of them dense, and micro-batches of one sequence of 4,096 tokens. An expert takes as many tokens as the
mean (capacity factor 1), and a token is sent once per expert. We leave out the clipping of gradients.

Source of gpt-oss-120b: NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md at 74695a06d (container
26.04), c0b9a0003 (26.02) and 1804c076f (25.11): all rows in bfloat16 on GPUs with a preset. The settings are in
scripts/performance/configs/gpt_oss and src/megatron/bridge/recipes/gpt_oss: gradients are
reduced in bfloat16, once per step, and only the optimizer's state is sharded. (For 25.11, the GB200's
batch is the table's, not the one in the settings.) On B200s, 26.04 sends a token once to each
rank that has any of its experts (HybridEP): to 3.3 of 8 ranks on average; we use 3. On GB200s,
it also overlaps all-to-alls with other work, which we leave out. An NVLink domain's GPUs
count as a host of 64. Half of this model's layers attend only to the last 128 tokens; here, all
attend to all. We also leave out biases, attention sinks, and the recomputation of norms and
activations.

Sources of the other rows with experts, which are all in bfloat16:

- OLMo 1B and OLMoE: Muennighoff et al., 2024, OLMoE, section 4.1.1, on 128 H100s; allenai/OLMoE at
  357454f, configs/ablations/olmo-1b-newhp-newds-cx5.yml and olmoe-8x1b-newhp-newds-cx5-fine1.yml.
  Their micro-batches have 8 sequences, which wouldn't fit by our count; we assume 4, as in the
  repository's launch script (scripts/olmoe-gantry.sh) and in the final model's configuration.
- Mixtral 8x7B: NVIDIA/Megatron-LM at e223b92072 (MCore v0.8), megatron/core/transformer/moe/README.md,
  on 64 H100s: 438 TFLOP/s per GPU (v0.9: 468) by that commit's formula, which counts as we do. We
  assume that it was measured with the reference mapping in the same file.
- Qwen3 30B on H100s: NVIDIA-NeMo/Automodel, docs/performance-summary.md of October 2025 (8d9bfb90e)
  with examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml. Its router, ``FakeBalancedGate`` in
  nemo_automodel/components/moe/layers.py (at 89e3a9f), gives a token eight consecutive experts, all
  on one of the eight ranks; DeepEP sends a token once to each rank that has any of its experts.
- Qwen3 30B on B200s: issue 79 of mlc-ai/pith-train (July 2026), torchtitan's figures there, of
  which we have read only an excerpt.
- Qwen3 235B on GB200s: NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md at 1804c076f (25.11).
  An NVLink domain's GPUs count as a host of 64 here. Experts are chosen at random, so a token's eight
  are on 7.2 of 32 ranks on average; we use 7.
- DeepSeek-V3 on GB200s: the same page, with scripts/performance/configs/deepseek. Its eight experts are on 7.6
  of 64 ranks on average; we use 8. We leave out the recomputation of queries', keys' and values' second matmuls.

In every table, one figure is fitted to the first row: the efficiency of arithmetic, as a
fraction of each GPU's peak. Attention is FlashAttention-2 in OLMo. For the others, it's cuDNN's, which is about
as fast as FlashAttention-3 on an H100, and was measured on a B200 (vgpu/time/costs.py). Elementwise operations are fused, except in
OLMo. We leave out norms of queries and keys, load-balancing losses, the kernels of Transformer
Engine, DeepEP and Megablocks, and CUDA graphs. Megatron shards only the optimizer's state; here,
pipelines gather parameters once per step. NeMo AutoModel keeps experts in bfloat16, unsharded, if no
two ranks share one; here, they are cast from float32 for each forward and backward.
"""

import dataclasses
from typing import Any, NamedTuple

import vgpu
from benchmarks._order import mean
from benchmarks.published import SPREAD
from vgpu.plan import Layout, Plan, estimate, predict
from vgpu.plan.experts import ExpertSizes
from vgpu.plan.transformer import DEEPSEEK, LLAMA, MIXTRAL, TransformerSizes


class Row(NamedTuple):
    name: str
    plan: Plan
    tokens_per_s: float  # per GPU
    attention: str = "flash 2"
    fuses: bool = True


_CONTEXT_HEAD = (
    "MooreThreads measured Megatron-LM with context parallelism on eight B200s, in bfloat16."
)
_WHY_CONTEXT = (
    "The first row has no context parallelism, so the efficiency can't hide what it costs. At first, we fitted to the "
    "first row with context parallelism instead, and the mean error of the other six was 8.3%. Then we changed two things: "
    "attention on a B200, assumed to reach the same share of the peak as on an H100, got the speeds that the same authors "
    "measured for it (`vgpu/time/costs.py`), and gradients are now reduced once per step (`sync_once`), as in "
    "Megatron-LM, not after each micro-batch. Since these rows are predicted well, the misses of torchtitan's rows "
    "above don't come from a general error in how context parallelism is modeled."
)
_DEEPSEEK_HEAD = (
    "MooreThreads measured Megatron-LM with experts on the same B200s, in bfloat16. The first row, which has no experts, "
    "is that of the previous table."
)
_WHY_DEEPSEEK = (
    "The efficiency comes from a model without experts, so it can't hide what experts and latent attention cost. We changed "
    "nothing after we first predicted these rows. The time that one more micro-batch adds is predicted to within 5%, except from 8 to 32 "
    "micro-batches of V2 with ep 8 (8% too little): there, the published step grows by 85 ms per micro-batch, but from 4 to 8 micro-batches by "
    "77. What doesn't depend on the number of micro-batches is predicted 15 to 48 ms too short. Part of that is the clipping of "
    "gradients; the rest is unexplained. Attention is counted with values as wide as keys (192 instead of 128), which cuDNN doesn't need."
)
_GPT_OSS_HEAD = (
    "NVIDIA benchmarked gpt-oss-120b with Megatron Bridge on 64 GPUs, in bfloat16. The first column gives the "
    "container's version."
)
_WHY_GPT_OSS = (
    "With ep 64 on B200s, all-to-alls between hosts take more than half of a predicted step; with ep 8, they stay "
    "within a host. That's why the two layouts differ so much, published and predicted. On B200s with ep 8, version "
    "26.04 is 59% faster than 25.11 with the same micro-batches, so no model of the work could predict both. It's "
    "unexplained why all rows on H100s, the only ones with a pipeline, are predicted 17% to 26% too slow. One cause may be "
    "the output layer in the last stage, which the others wait for: in the model, its large matmul reaches the same low "
    "share of the peak as the experts' matmuls. If the output layer's work is halved in all rows, these errors shrink to 6% to 20%."
)
_EXPERTS_HEAD = (
    "Models with experts come from several frameworks, all in bfloat16, on GPUs without a power "
    "limit that we know of. The first row, OLMo 1B, has no experts."
)
_WHY_EXPERTS = (
    "No single efficiency matches these rows. NVIDIA's own frameworks (Mixtral, Qwen3 30B on H100s, Qwen3 235B, "
    "DeepSeek-V3) are faster than predicted; OLMoE, and torchtitan (Qwen3 30B on B200s), are slower. At 0.8 of the peak, the most "
    "that bfloat16 matmuls reach on an H100 (see `CostModel`), the errors of Mixtral and of Qwen3 30B on H100s would be -9% and "
    "+3%, and those of OLMoE and of torchtitan's Qwen3 30B +43% and +41%. The "
    "trivial predictor does about as well as ours, because four of these six runs reach about the same fraction of "
    "the peak as OLMo 1B's, 0.33; Mixtral's reaches 0.44, and OLMoE's 0.21.\n\n"
    "What we know of the differences:\n\n"
    "- Mixtral: of its 32 stages, our second has two layers and our last has none, only the output (as torchtitan "
    "divides them), so one rank has nine layers; in Megatron, each has eight.\n"
    "- OLMoE: Megablocks ran its sparse kernels (`moe_mlp_impl: sparse`); for Hopper, its README recommends grouped "
    "matmuls instead.\n"
    "- Qwen3 30B on B200s: torchtitan multiplies the experts' outputs by the router's weights in float32, and has separate "
    "matmuls for gates and values (torchtitan/models/common at b5bcd76c6, a month later). Tokens were routed by a real router, so "
    "experts weren't equally busy.\n"
    "- Qwen3 30B on H100s: as in NeMo AutoModel, gates and values are one matrix here, and the router's weights "
    "multiply the inner values (`vgpu/plan/experts.py`).\n\n"
    "How much of each miss these differences explain is unknown; the rest is unexplained."
)


OLMO = TransformerSizes(16, 2048, 16, 16, 8192, 50_304, 4096)
QWEN3 = TransformerSizes(
    48, 2048, 32, 4, 6144, 151_936, head_size=128, experts=ExpertSizes(128, 8, 768)
)
QWEN3_235B = TransformerSizes(
    94,
    4096,
    64,
    4,
    12_288,
    151_936,
    head_size=128,
    experts=ExpertSizes(128, 8, 1536, ranks_per_token=7),
)
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK["DeepSeek-V3"],
    experts=dataclasses.replace(DEEPSEEK["DeepSeek-V3"].experts, ranks_per_token=8),
)


def _with_experts(sizes: TransformerSizes, *experts: int, **options: int) -> TransformerSizes:
    return dataclasses.replace(sizes, experts=ExpertSizes(*experts, **options))


def _megatron(
    sizes: TransformerSizes,
    layout: Layout,
    sequence: int,
    batch: int,
    count: int,
    gpu: str,
    **options: Any,
) -> Plan:
    """Return a plan with ``count`` micro-batches in which only the optimizer's state is sharded."""
    if layout.pp > 1:
        batch, options["micro_batches"] = batch * count, count
    else:
        options |= {"accumulate": count, "sync_once": True}
    options["gpus_per_host"] = 64 if gpu == "GB200" else 8
    return Plan(sizes, layout, batch, sequence, reshard_after_forward=False, gpu=gpu, **options)


def _on_b200s(
    name: str, sizes: TransformerSizes, layout: Layout, sequence: int, count: int, ms: float
) -> Row:
    plan = _megatron(sizes, layout, sequence, 1, count, "B200")
    return Row(name, plan, plan.tokens / 8 / (ms / 1e3), attention="flash 3")


def _llama_on_b200s(model: str, layers: int, layout: Layout, sequence: int, ms: float) -> Row:
    sizes = dataclasses.replace(LLAMA[model], layers=layers)
    if model == "405B":
        sizes = dataclasses.replace(sizes, key_value_heads=16)
    name = f"{model}, {layers} layers, {sequence:,} tokens"
    return _on_b200s(name, sizes, layout, sequence, 4, ms)


CONTEXT = (
    _llama_on_b200s("70B", 12, Layout(dp_shard=4, tp=2), 4096, 725.5),
    _llama_on_b200s("70B", 12, Layout(tp=2, cp=4), 32_768, 1758.0),
    _llama_on_b200s("70B", 12, Layout(cp=8), 32_768, 1768.1),
    _llama_on_b200s("405B", 4, Layout(tp=2, cp=4), 32_768, 1984.7),
    _llama_on_b200s("405B", 4, Layout(cp=8), 32_768, 2003.6),
    _llama_on_b200s("70B", 12, Layout(tp=2, cp=4), 131_072, 11_315.7),
    _llama_on_b200s("70B", 12, Layout(cp=8), 131_072, 11_301.9),
    _llama_on_b200s("405B", 4, Layout(tp=2, cp=4), 131_072, 10_577.6),
)


def _deepseek(version: str, layout: Layout, milliseconds: dict[int, float]) -> list[Row]:
    """Return a row for each number of micro-batches, on 8 B200s."""
    name = f"DeepSeek-{version}"
    experts = dataclasses.replace(DEEPSEEK[name].experts, dense_layers=1)
    sizes = dataclasses.replace(DEEPSEEK[name], layers=4, experts=experts)
    return [
        _on_b200s(f"{name}, 4 layers", sizes, layout, 4096, count, ms)
        for count, ms in milliseconds.items()
    ]


_EP8_ALONE, _EP4_PP2 = Layout(dp_shard=8, ep=8), Layout(pp=2, dp_shard=4, ep=4)
DEEPSEEK_ROWS = (
    *_deepseek("V2", _EP8_ALONE, {4: 366.6, 8: 676.2, 32: 2721.3}),
    *_deepseek("V2", _EP4_PP2, {4: 282.1, 8: 492.6, 32: 1727.7}),
    *_deepseek("V3", _EP8_ALONE, {4: 603.2, 8: 1101.7, 32: 4141.2}),
    *_deepseek("V3", _EP4_PP2, {4: 452.2, 8: 771.6, 32: 2718.6}),
)


def _gpt_oss(
    container: str,
    tokens_per_s: float,
    layout: Layout,
    gpu: str,
    batch: int,
    sequence: int = 4096,
    sequences: int = 1280,
    ranks_per_token: int | None = None,
) -> Row:
    """Return a row of gpt-oss-120b; ``batch`` is the micro-batch, ``sequences`` are per step."""
    experts = ExpertSizes(128, 4, 2880, ranks_per_token=ranks_per_token)
    sizes = TransformerSizes(36, 2880, 64, 8, 2880, 201_088, head_size=64, experts=experts)
    count = sequences // (layout.dp * batch)
    plan = _megatron(sizes, layout, sequence, batch, count, gpu, reduce="bfloat16")
    return Row(container, plan, tokens_per_s, attention="flash 3")


_EP64, _EP8 = Layout(dp_shard=64, ep=64), Layout(dp_shard=64, ep=8)
_PP4 = Layout(pp=4, dp_shard=16, ep=8)
GPT_OSS = (
    _gpt_oss("26.04", 15_938, _EP64, "GB200", 4),
    _gpt_oss("26.04", 13_045, _EP8, "B200", 4, ranks_per_token=3),
    _gpt_oss("26.04", 5810, _PP4, "H100", 1),
    _gpt_oss("26.02", 15_784, _EP64, "GB200", 4),
    _gpt_oss("26.02", 8047, _EP64, "B200", 4),
    _gpt_oss("26.02", 5993, _PP4, "H100", 1),
    _gpt_oss("25.11, 8,192 tokens", 15_876, _EP64, "GB200", 1, 8192),
    _gpt_oss("25.11", 8213, _EP8, "B200", 4, sequences=512),
    _gpt_oss("25.11", 5630, _PP4, "H100", 4, sequences=512),
)
_PP4_EP64, _PP8_EP32 = Layout(dp_shard=64, pp=4, ep=64), Layout(dp_shard=32, pp=8, ep=32)
EXPERTS = (
    Row(
        "OLMo 1B, no experts",
        Plan(OLMO, Layout(dp_shard=128), 4, accumulate=2),
        37_500,
        fuses=False,
    ),
    Row(
        "OLMoE 1B-7B, 8 of 64",
        Plan(_with_experts(OLMO, 64, 8, 1024), Layout(dp_shard=128), 4, accumulate=2),
        23_600,
        fuses=False,
    ),
    Row(
        "Mixtral 8x7B, 2 of 8",
        _megatron(MIXTRAL["8x7B"], _PP4, 4096, 1, 16, "H100", chunks=8),
        438e12 / estimate.flop_per_token(MIXTRAL["8x7B"], 4096),
        attention="flash 3",
    ),
    Row(
        "Qwen3 30B, 8 of 128",
        Plan(
            _with_experts(QWEN3, 128, 8, 768, ranks_per_token=1),
            Layout(dp_shard=8, ep=8),
            4,
            4096,
            "full",
            accumulate=16,
        ),
        12_040,
        attention="flash 3",
    ),
    Row(
        "Qwen3 30B, 8 of 128",
        Plan(QWEN3, Layout(dp_shard=8), 8, 8192, "selective", gpu="B200"),
        19_490,
        attention="flash 3",
    ),
    Row(
        "Qwen3 235B, 8 of 128",
        _megatron(QWEN3_235B, _PP8_EP32, 4096, 1, 256, "GB200", chunks=3),
        4916,
        attention="flash 3",
    ),
    Row(
        "DeepSeek-V3, 8 of 256",
        _megatron(DEEPSEEK_V3, _PP4_EP64, 4096, 1, 64, "GB200", chunks=4, reduce="bfloat16"),
        3139,
        attention="flash 3",
    ),
)


def _flop_per_token(row: Row) -> float:
    return estimate.flop_per_token(row.plan.sizes, row.plan.sequence)


def main() -> str:
    lines = ["## Context parallelism and experts, predicted", ""]
    for rows, head, why in (
        (CONTEXT, _CONTEXT_HEAD, _WHY_CONTEXT),
        ((CONTEXT[0], *DEEPSEEK_ROWS), _DEEPSEEK_HEAD, _WHY_DEEPSEEK),
        (GPT_OSS, _GPT_OSS_HEAD, _WHY_GPT_OSS),
        (EXPERTS, _EXPERTS_HEAD, _WHY_EXPERTS),
    ):
        lines += [*_fitted(rows, head), "", why, ""]
    return "\n".join(lines[:-1])


def _fitted(rows: tuple[Row, ...], head: str) -> list[str]:
    """Return a table as Markdown, with the efficiency of arithmetic fitted to the first row."""
    fitted = rows[0]
    fitted_s = fitted.plan.tokens / fitted.plan.layout.ranks / fitted.tokens_per_s
    step = predict(fitted.plan, **_costs(fitted))
    share = vgpu.fit_share(lambda share: step.replayed(arithmetic_share=share).seconds, fitted_s)
    lines = [
        f"{head} Fitted to the first row, arithmetic reaches {share:.3f} of the peak. The trivial "
        "predictor gives every row the same fraction of its GPU's peak as the first row's FLOP/s.",
        "",
        "| model | GPUs | layout, batch, recompute | tokens/s/GPU, published | predicted | error | trivial |",
        "|---|---|---|---|---|---|---|",
    ]
    fitted_flop_per_s = fitted.tokens_per_s * _flop_per_token(fitted)
    errors = []
    for row in rows:
        plan = row.plan
        predicted = predict(plan, **_costs(row), arithmetic_share=share).tokens_per_s
        same = fitted_flop_per_s / _flop_per_token(row)  # the first row's FLOP/s on every GPU
        trivial = same * plan.spec.tensor_flop_per_s / fitted.plan.spec.tensor_flop_per_s
        error, of_trivial, of_same = (
            tokens_per_s / row.tokens_per_s - 1 for tokens_per_s in (predicted, trivial, same)
        )
        errors.append((error, of_trivial, of_same))
        gpu = plan.spec.name.removeprefix("Virtual ").split()[0]
        batch = f"{plan.micro_batch} × {plan.batch // plan.micro_batch * plan.accumulate}"
        lines.append(
            f"| {row.name} | {plan.layout.ranks} {gpu} | {plan.layout}, {batch}, {plan.recompute} | "
            f"{row.tokens_per_s:,.0f} | {predicted:,.0f} | {error:+.1%} | {of_trivial:+.1%} |"
        )
    ours, trivial_errors, same_errors = (mean(each) for each in zip(*errors[1:], strict=True))
    means = f"The mean error is {ours:.1%} (trivial: {trivial_errors:.1%}"
    if len({row.plan.spec for row in rows}) > 1:
        means += f"; with the first row's FLOP/s on every GPU: {same_errors:.1%}"
    return [*lines, "", f"{means})."]


def _costs(row: Row) -> dict[str, Any]:
    return {"fuses": row.fuses, "attention": row.attention, "speed_spread": SPREAD}


if __name__ == "__main__":
    print(main())
