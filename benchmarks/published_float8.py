"""Predict runs with float8 and context parallelism that torchtitan published.

Source of the rows with float8: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
(tables 1 to 6) and asyncTP_llama3_h100_2025-06_torchtitan.md, on the H100s of ``published.py``:
float8 with one scale per tensor, torch.compile. Their one fitted figure is that of
``published.py``, from a row in bfloat16. Steps are extrapolated from four and five layers. We leave
out FSDP2's float8 all-gathers, and asynchronous float8 gathers that torch.compile overlaps with
matmuls.
"""

from collections import defaultdict
from typing import NamedTuple

import torch

from benchmarks._order import mean
from benchmarks.published import FITTED, GPU, SPREAD, fitted_share
from vgpu.plan import Layout, Plan, estimate, extrapolate, predict
from vgpu.plan.transformer import LLAMA


class Row(NamedTuple):
    name: str
    plan: Plan
    tokens_per_s: float | None  # per GPU
    async_tokens_per_s: float | None = None  # with asynchronous tensor parallelism
    reserved_gib: float | None = None


_RESERVED = "Predicted GiB reserved by the fullest rank, compared with the published figure"
_WHY = (
    "The predicted gain of asynchronous tensor parallelism with float8 is too small, since only "
    "reduce-scatters are split into pieces here, not gathers.\n\n"
    "405B ran in pipelines. The number of micro-batches wasn't published; 8, the number of stages, was the "
    "default at 9dec370, the torchtitan commit that was benchmarked "
    "(`pipeline_parallel_microbatches` in torchtitan/config_manager.py). Memory is predicted for "
    "PyTorch 2.15. Up to 2.14, a pipeline stage also kept a buffer for each micro-batch and each gradient "
    "that it received, and its outputs until their backward passes; the last stage kept all logits until the end of the "
    "step (torch/distributed/pipelining/stage.py). A rank's part of a micro-batch has 0.125 GiB here, and its logits "
    "0.98 GiB. By that count, the interleaved run's last rank held 8 to 9 GiB more than predicted, and 1F1B's first rank 1 to 2 GiB "
    "more. It's unexplained why sequences "
    "of 32,768 and 65,536 tokens took less memory than those of 8,192, with the same number of tokens in a "
    "micro-batch.\n\n"
    "The speeds with context parallelism are unexplained. Without it, sequences of 32,768 tokens are predicted 10% to 18% "
    "too fast: the published runs' GPUs were limited to 500 W, and the speed of FlashAttention-2 was measured "
    "on different ones. With it, the published speed falls behind even more, but inconsistently: relative to "
    "the row without context parallelism, 405B loses about as much on 4 ranks as on 2, while 8B loses nothing "
    "on 2, but a quarter on 4. No model in which attention's work grows with the length matches all of them. The prediction follows torchtitan's default at 9dec370 (keys and values are "
    "gathered, and each rank has a chunk from the start and one from the end); whether the "
    "published runs did the same isn't stated. Without such balancing, the last of 4 or 8 ranks "
    "takes 1.75 or 1.88 times the mean, which is about what attention took in 8B's two longest rows; "
    "but the last of 2 takes 1.5 times the mean, whereas attention took only 1.2 times the mean in that "
    "row."
)


def _llama(model: str, layout: Layout, batch: int, recompute: str, sequence: int = 8192) -> Plan:
    return Plan(LLAMA[model], layout, batch, sequence, recompute, gpu=GPU, float8=True)


def _long(dp_shard: int, cp: int, tokens_per_s: float) -> Row:
    sequence = 32_768 * cp
    plan = _llama("8B", Layout(dp_shard=dp_shard, cp=cp), 1, "full", sequence)
    return Row(f"8B, float8, {sequence:,} tokens", plan, tokens_per_s)


def _pipelined(
    name: str,
    tokens_per_s: float,
    reserved_gib: float,
    batch: int = 32,
    cp: int = 1,
    sequence: int = 8192,
    chunks: int = 1,
) -> Row:
    """Return a row of 405B on 512 GPUs, with asynchronous tensor parallelism."""
    layout = Layout(dp_shard=8 // cp, tp=8, pp=8, cp=cp)
    plan = Plan(
        LLAMA["405B"],
        layout,
        batch,
        sequence,
        "full",
        reshard_after_forward=False,  # torchtitan's choice in a pipeline
        gpu=GPU,
        chunks=chunks,
        float8=True,
    )
    return Row(f"405B, float8, {name}", plan, None, tokens_per_s, reserved_gib)


def _long_and_pipelined(cp: int, tokens_per_s: float, reserved_gib: float) -> Row:
    sequence = 32_768 * cp
    name = f"{sequence:,} tokens"
    return _pipelined(name, tokens_per_s, reserved_gib, 8, cp, sequence)


ROWS = (
    Row("8B, float8", _llama("8B", Layout(dp_shard=8), 2, "selective"), 8532),
    Row("8B, float8", _llama("8B", Layout(dp_shard=128), 2, "selective"), 8380),
    Row("8B, float8", _llama("8B", Layout(dp_shard=8, tp=8), 12, "selective"), 5078.1, 5570.1),
    Row("70B, float8", _llama("70B", Layout(dp_shard=32, tp=8), 16, "full"), 809.8, 942.4),
    _pipelined("1F1B", 100, 82.5),
    _pipelined("interleaved 1F1B", 128, 72.7, chunks=2),
    _long(8, 1, 3890),
    _long(4, 2, 2540),
    _long(2, 4, 1071),
    _long(1, 8, 548),
    _long_and_pipelined(1, 76, 75.3),
    _long_and_pipelined(2, 47, 75.9),
    _long_and_pipelined(4, 31, 77.1),
    _long_and_pipelined(8, 16, 84.9),
)


def _kind(row: Row) -> str:
    return "long sequences" if row.plan.sequence > 8192 else "float8"


def main() -> str:
    costs = {"arithmetic_share": fitted_share(), "speed_spread": SPREAD}
    fitted_flop = FITTED.tokens_per_s * FITTED.flop_per_token
    lines = [
        "## torchtitan's runs with float8 and long sequences, predicted",
        "",
        "These are runs of Llama 3.1 with float8 matmuls and torch.compile (torchtitan); the "
        "docstring of `benchmarks/published_float8.py` explains the method. Nothing is fitted to these rows: arithmetic reaches "
        f"{costs['arithmetic_share']:.3f} of the peak, even in float8, as fitted to the first of "
        "the published training runs above. The trivial predictor gives every row that run's "
        f"FLOP/s. Predicted with torch {torch.__version__.partition('+')[0]}.",
        "",
        "| model | GPUs | layout, batch, recompute | tokens/s/GPU, published | predicted | error | trivial |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    reserved = []
    for row in ROWS:
        plan = row.plan
        if plan.layout.pp > 1:
            found = predict(plan, **costs, fuses=True, async_tp=True)
            pairs = [(", async_tp", row.async_tokens_per_s, found.tokens_per_s)]
            gib = found.reserved_bytes / 2**30
            reserved.append(f"{row.name}: {gib:.1f} instead of {row.reserved_gib}")
        else:
            step = extrapolate(plan, **costs, fuses=True, attention="flash 2")
            pairs = [("", row.tokens_per_s, step.tokens_per_s())]
            if row.async_tokens_per_s is not None:
                async_tokens_per_s = step.tokens_per_s(async_tp=True)
                pairs.append((", async_tp", row.async_tokens_per_s, async_tokens_per_s))
        trivial = fitted_flop / estimate.flop_per_token(plan.sizes, plan.sequence)
        for how, published, predicted in pairs:
            assert published is not None
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
    lines += ["", f"The mean errors are: {'; '.join(means)}.", ""]
    return "\n".join([*lines, f"{_RESERVED}: {'; '.join(reserved)}.", "", _WHY])


if __name__ == "__main__":
    print(main())
