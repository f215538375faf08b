"""Predict published training runs with PyTorch's own parallel code, run as one rank of a cluster.

Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-
06_torchtitan.md. The hosts have 8 H100s with 96 GB HBM2e (2.4 TB/s), NVLink inside, and 400 Gb/s per GPU
between hosts. The runs are of Llama 3.1 with sequence length 8192, bfloat16 parameters, float32 reduction and
AdamW; FSDP2, and tensor parallelism with sequence parallelism and loss parallelism, are applied as
in torchtitan. Selective recomputation keeps attention's outputs and every second matmul of a block; full
recomputation keeps only the block's input.

One figure is fitted, to the first row: the efficiency of arithmetic on the average GPU, as a
fraction of the H100's peak. How much GPUs vary is taken from a measurement elsewhere (SPREAD). All
other figures come from datasheets or are CostModel's defaults. Rows in float8, among them all of Llama
405B, are in published_float8.py. Two rows were also published with asynchronous tensor
parallelism, and are replayed with it. Two things aren't modeled: clocks that fall at a power limit,
which is the likely reason why the gains of torch.compile and of asynchronous tensor parallelism are
both overestimated; and, in the tables, the multiprocessors that NCCL's kernels take from the
kernels that they run alongside.
"""

import dataclasses
import time
from typing import NamedTuple

import vgpu
from benchmarks._order import order
from vgpu.plan import Layout, Plan, Step, estimate, predict
from vgpu.plan.transformer import LLAMA

GPU = dataclasses.replace(
    vgpu.get_spec("H100"),
    name="Virtual H100 96GB HBM2e",
    memory_bytes=96 * 2**30,
    memory_bandwidth_bytes_per_s=2.4e12,
)
SEQUENCE = 8192
SPREAD = 0.016  # of matmul times on 392 V100s in one cluster: source at CostModel.speed_spread


class Row(NamedTuple):
    model: str
    gpus: int
    tensor_parallel: int
    batch: int  # per tensor-parallel group
    recompute: str  # "selective" or "full"
    compiled: bool
    tokens_per_s: float  # per GPU
    reserved_gib: float | None = None
    async_tokens_per_s: float | None = None  # with asynchronous tensor parallelism

    @property
    def plan(self) -> Plan:
        layout = Layout(dp_shard=self.gpus // self.tensor_parallel, tp=self.tensor_parallel)
        return Plan(LLAMA[self.model], layout, self.batch, SEQUENCE, self.recompute, gpu=GPU)

    @property
    def layout(self) -> str:
        shards = f"FSDP {self.gpus // self.tensor_parallel}"
        tensor = f" × TP {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{shards}{tensor}, {self.batch}, {self.recompute}"

    @property
    def flop_per_token(self) -> float:
        """Return the model's FLOPs, forward and backward, without recomputation."""
        return estimate.flop_per_token(LLAMA[self.model], SEQUENCE)


ROWS = (
    Row("8B", 8, 1, 2, "selective", False, 5762, 82.4),
    Row("8B", 8, 1, 2, "selective", True, 6667, 77.0),
    Row("8B", 128, 1, 2, "selective", False, 5605, 67.0),
    Row("8B", 128, 1, 2, "selective", True, 6514, 62.0),
    Row("8B", 64, 8, 12, "selective", True, 4378, None, 4809),
    # Its memory was published only for float8, which takes 0.2 GiB less in the 8B rows.
    Row("70B", 256, 8, 16, "full", True, 597, 71.9, 652),
)
FITTED = ROWS[0]

_PIECES = (
    "The gain is overestimated, but not because the wrong collectives and matmuls overlap here: PyTorch's "
    "own pass, run on a block compiled for eight ranks, finds the same pairs, with the same copies for "
    "the weights' gradients (`vgpu/time/compiler_passes.py` lists what else it copies, about 1% of a "
    "step). It's the steps without asynchronous tensor parallelism that stand out. Whenever a change "
    "shrinks the part of a step that isn't matmuls or attention, as torch.compile and asynchronous tensor "
    "parallelism do, the prediction becomes too fast:"
)
_POWER = (
    "The likely reason is power, although no published clock rate proves it: these GPUs were limited to "
    "500 W of their 700 W (torchtitan says so, and adds that a higher limit could make them faster), "
    "and the larger the part of a step spent in matmuls, the lower the clock. Modeling that would require "
    "the measured power of every kernel; here there is one clock, set by the first row. Two more effects that could cost some "
    "of the gain are left out: copies take memory bandwidth from the matmuls that run at the same time, "
    "and ranks wait for each other between pieces."
)


def fitted_share() -> float:
    """Return the fraction of peak arithmetic at which the prediction matches the fitted row."""
    step = predict(FITTED.plan, speed_spread=SPREAD)
    return vgpu.fit_share(
        lambda share: vgpu.replay(step.timeline, arithmetic_share=share).makespan_s,
        FITTED.plan.tokens / FITTED.gpus / FITTED.tokens_per_s,
    )


def main() -> str:
    share = fitted_share()
    lines = [
        "## Published training runs, predicted",
        "",
        "These are runs of Llama 3.1 with PyTorch's own FSDP2 and tensor parallelism on H100s (torchtitan, "
        "December 2024 and June 2025); the docstring of `benchmarks/published.py` explains the method. "
        f"Fitted to the first row, arithmetic reaches {share:.3f} of the peak on the average GPU. Matmul "
        f"times differ by {SPREAD:.1%} from GPU to GPU (the standard deviation on 392 V100s in one "
        "cluster), and all GPUs wait for the slowest. The trivial predictor gives every row the first "
        "row's FLOP/s. Memory is what PyTorch's allocator reserves, from a replay of every allocation; "
        "the last column is the peak of allocated bytes. 70B's memory was published only for float8; "
        "it's unexplained why its prediction is too low.",
        "",
        "| model | GPUs | layout, batch, recompute | compile | tokens/s/GPU, published | predicted "
        "| error | trivial | GiB reserved, published | predicted | error | GiB allocated, predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    costs = {"arithmetic_share": share, "speed_spread": SPREAD}
    rows = [(row, predict(row.plan, **costs, fuses=row.compiled)) for row in ROWS]
    for row, found in rows:
        trivial = FITTED.tokens_per_s * FITTED.flop_per_token / row.flop_per_token
        reserved = f"{row.reserved_gib}" if row.reserved_gib else ""
        reserved_gib, allocated_gib = found.reserved_bytes / 2**30, found.allocated_bytes / 2**30
        error = f"{reserved_gib / row.reserved_gib - 1:+.1%}" if row.reserved_gib else ""
        lines.append(
            f"| {row.model} | {row.gpus} | {row.layout} | {'yes' if row.compiled else ''} | "
            f"{row.tokens_per_s:,.0f} | {found.tokens_per_s:,.0f} | "
            f"{found.tokens_per_s / row.tokens_per_s - 1:+.1%} | "
            f"{trivial / row.tokens_per_s - 1:+.1%} | {reserved} | {reserved_gib:.1f} | "
            f"{error} | {allocated_gib:.1f} |"
        )
    of_8b = [(row.tokens_per_s, found.tokens_per_s) for row, found in rows if row.model == "8B"]
    lines += ["", f"For 8B: {order(*zip(*of_8b, strict=True))}", ""]
    lines += [*async_tp(rows), ""]
    lines += [_few_and_many({row: found for row, found in rows}), ""]
    lines += [_own_time()]
    return "\n".join(lines)


def async_tp(rows: list[tuple[Row, Step]]) -> list[str]:
    """Return the rows that were also published with asynchronous tensor parallelism, as Markdown."""
    lines = [
        "With asynchronous tensor parallelism (`async_tp=True`) and the same fitted figure:",
        "",
        "| model | GPUs | tokens/s/GPU, published | predicted | error |",
        "|---|---|---|---|---|",
    ]
    (eager, compiled, eager_128, compiled_128), shared = rows[:4], rows[4:]
    changes = [
        ("8B, torch.compile", *_measured(eager), *_measured(compiled)),
        ("8B, torch.compile", *_measured(eager_128), *_measured(compiled_128)),
    ]
    for row, found in shared:
        assert row.async_tokens_per_s is not None
        again = found.replayed(async_tp=True)
        tokens_per_s, products = again.tokens_per_s, _in_products(again.timeline)
        with_it = _Measured(row.gpus, row.async_tokens_per_s, tokens_per_s, products)
        changes.append((f"{row.model}, async_tp", *_measured((row, found)), *with_it))
        lines.append(
            f"| {row.model} | {row.gpus} | {row.async_tokens_per_s:,.0f} | {tokens_per_s:,.0f} | "
            f"{tokens_per_s / row.async_tokens_per_s - 1:+.1%} |"
        )
    lines += [
        "",
        _PIECES,
        "",
        "| what changes | GPUs | gain, published | predicted | excess | part of a step in matmuls, "
        "before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, gpus, published, predicted, share, _, published_then, predicted_then, then in changes:
        measured, ours = published_then / published, predicted_then / predicted
        lines.append(
            f"| {name} | {gpus} | {measured - 1:+.1%} | {ours - 1:+.1%} | {ours / measured - 1:+.1%} | "
            f"{share:.0%} | {then:.0%} |"
        )
    return [*lines, "", _POWER]


class _Measured(NamedTuple):
    gpus: int
    tokens_per_s: float
    predicted_tokens_per_s: float
    in_products: float


def _measured(one: tuple[Row, Step]) -> _Measured:
    row, found = one
    return _Measured(row.gpus, row.tokens_per_s, found.tokens_per_s, _in_products(found.timeline))


def _in_products(timeline: vgpu.Timeline) -> float:
    """Return the fraction of a step that the GPU spends in matmuls, including attention's."""
    busy_s = sum(e.end_s - e.start_s for e in timeline.events if e.kind == "kernel" and e.flop)
    return busy_s / timeline.makespan_s


def _few_and_many(found: dict[Row, Step]) -> str:
    """Say how much slower 128 GPUs are than 8, and why."""
    few, many = ROWS[0], ROWS[2]

    def slower(
        of_few: dict[str, float] | None = None, of_many: dict[str, float] | None = None
    ) -> str:
        of_128, of_8 = found[many].replayed(**of_many or {}), found[few].replayed(**of_few or {})
        return f"{of_128.tokens_per_s / of_8.tokens_per_s - 1:+.1%}"

    alike = {"speed_spread": 0.0}
    taken, taken_by_few = {"collective_processors": 16}, {"collective_processors": 24}
    slow = {**taken, "network_share": 0.2}
    return (
        f"A step on 128 GPUs hides its gathers, as a step on 8 does, and each GPU updates fewer parameters. "
        f"If all GPUs were identical, the speed per GPU would change by {slower(alike, alike)}. Waiting for "
        f"the slowest of 128 instead of 8 makes that {slower()}; the published change is "
        f"{many.tokens_per_s / few.tokens_per_s - 1:+.1%}. NCCL's kernels take multiprocessors from the "
        "kernels that they run alongside: with 24 of 132 multiprocessors on 8 GPUs, which is what "
        f"NCCL prints, and 16 on 128 GPUs, two for each adapter, the change is {slower(taken_by_few, taken)}. The rest may come from the "
        "network, which is assumed to reach 0.8 of its bandwidth: with 0.2, which is 80 GB/s, the change "
        f"is {slower(taken_by_few, slow)}. One cluster measured 69 GB/s on 8 hosts and 55 on 16 "
        "(all-gather; Ultra-Scale Playbook, 2025)."
    )


def _own_time() -> str:
    """Say how long predicting two steps and their memory takes on this machine."""
    begin_s = time.process_time()
    predict(Row("8B", 512, 1, 2, "selective", False, 0.0).plan)
    return (
        f"Predicting two steps of 8B, one of which is recorded, as one rank of 512 took "
        f"{time.process_time() - begin_s:.1f} s of one core here, including building the model and "
        "replaying its memory."
    )


if __name__ == "__main__":
    print(main())
