"""Predict Megatron-LM's training runs on A100s, from a layer timed on one rank and a simulated schedule.

Sources: Narayanan et al., 2021, Efficient large-scale language model training on GPU clusters
(table 1: full recomputation, tensor and pipeline parallelism, interleaved where chunks are given);
Korthikanti et al., 2022, Reducing activation recomputation in large transformer models (table 5).
The docstring of ``vgpu/plan/megatron.py`` explains how the time of a step is predicted.

Two figures are fitted, to the first and the last row of the first paper: the efficiencies of
arithmetic and memory, as fractions of the A100's peaks. The table also shows predictions fitted to
the first row alone, with CostModel's default for memory. How much GPUs vary was measured elsewhere
(SPREAD). The second paper is predicted with the same two figures. It used a later Megatron-LM,
which all-reduces gradients while the next matmul runs, and whose 1000B model takes 8% less time
than the first paper's with the same layout.
"""

from typing import NamedTuple

import vgpu
from benchmarks._order import order
from benchmarks.published import SPREAD
from vgpu.plan.megatron import (
    FITTED,
    FULL,
    ROWS,
    SELECTIVE,
    Run,
    Shares,
    fitted,
    seconds_at,
    step_s,
    tera,
)
from vgpu.plan.megatron_layers import GPTSizes


class Seconds(NamedTuple):
    """Seconds per step, from Korthikanti et al., table 5."""

    name: str
    run: Run
    full: float
    selective: float


# Narayanan et al. waited for each all-reduce; Megatron-LM's LinearWithGradAccumulationAndAsync-
# Communication, of 2022, does not.
TABLE_5 = (
    Seconds("22", Run(GPTSizes(48, 6144, 64), 8, 1, 1, 8, 4, 4, FULL, True), 1.42, 1.10),
    Seconds("175", Run(GPTSizes(96, 12288, 96), 8, 8, 3, 64, 64, 1, FULL, True), 18.13, 13.75),
    Seconds("530", Run(GPTSizes(105, 20480, 128), 8, 35, 3, 280, 280, 1, FULL, True), 49.05, 37.83),
    Seconds(
        "1000", Run(GPTSizes(128, 25600, 160), 8, 64, 1, 512, 512, 1, FULL, True), 94.42, 71.49
    ),
)


_SMALL = (
    "Waves of tiles that don't fill the A100 cost a few percent at most, in both narrow and wide layers. "
    "Wide layers are faster because their dot products are longer, so less is written for the same FLOPs."
)


def fitted_to_both() -> Shares:
    """Return the efficiencies at which the predictions match the first and the last row.

    The higher memory's efficiency is, the lower the arithmetic efficiency that matches the first row,
    and the slower the last row's prediction.
    """

    def at(memory: float) -> Shares:
        return fitted(FITTED.run, seconds_at(FITTED.run, FITTED.tera), memory, SPREAD)

    last = ROWS[-1]
    low, high = 0.55, 0.95
    while high - low > 1e-3:
        middle = (low + high) / 2
        if tera(last.run, at(middle)) > last.tera:
            low = middle
        else:
            high = middle
    return at((low + high) / 2)


def fitted_to_first() -> Shares:
    """Return the arithmetic efficiency that matches the first row, with memory's default efficiency."""
    assumed = vgpu.CostModel(vgpu.get_spec("A100")).memory_share
    return fitted(FITTED.run, seconds_at(FITTED.run, FITTED.tera), assumed, SPREAD)


def main() -> str:
    shares, first = fitted_to_both(), fitted_to_first()
    lines = [
        "## Megatron-LM's training runs, predicted",
        "",
        "The first table gives TFLOP/s per GPU on A100s (Narayanan et al., 2021), including "
        "recomputation; the docstring of `benchmarks/published_megatron.py` explains the method. Fitted to "
        f"the first and the last row, arithmetic reaches {shares.arithmetic:.3f} of its peak and memory "
        f"{shares.memory:.3f}. Fitted to the first row alone, arithmetic reaches {first.arithmetic:.3f}, "
        f"with memory at the default of {first.memory:.1f}. Matmul times differ by {SPREAD:.1%} from GPU "
        "to GPU, and all GPUs wait for the slowest. The trivial predictor gives every row the first row's "
        "TFLOP/s.",
        "",
        "| parameters, 10⁹ | TP × PP (chunks), batch/micro-batch | GPUs | published | predicted | "
        "error | from the first row alone | error | trivial |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors, errors_first, trivial, all_found, all_first = [], [], [], [], []
    for row in ROWS:
        found, of_first = tera(row.run, shares), tera(row.run, first)
        all_found.append(found)
        all_first.append(of_first)
        errors.append(found / row.tera - 1)
        errors_first.append(of_first / row.tera - 1)
        trivial.append(FITTED.tera / row.tera - 1)
        lines.append(
            f"| {row.name} | {row.run.layout} | {row.run.gpus} | {row.tera} | {found:.0f} | "
            f"{errors[-1]:+.1%} | {of_first:.0f} | {errors_first[-1]:+.1%} | {trivial[-1]:+.1%} |"
        )
    published = [row.tera for row in ROWS]
    lines += [
        "",
        f"{_mean(errors, trivial).capitalize()} {order(published, all_found)}",
        "",
        _furthest(errors, shares),
        "",
        f"Fitted to the first row alone, {_mean(errors_first, trivial)} {order(published, all_first)} "
        f"{_SMALL}",
        "",
        *_table_5(shares),
    ]
    return "\n".join(lines)


def _furthest(errors: list[float], shares: Shares) -> str:
    """Say whether chunks explain the row with the largest error."""
    error, row = max(zip(errors, ROWS, strict=True), key=lambda pair: abs(pair[0]))
    plain = tera(row.run._replace(chunks=1), shares)
    return (
        f"The row with {row.name} billion parameters has the largest error, {error:+.1%}. Its "
        f"{row.run.chunks} chunks per rank shorten the bubble, and nothing else here distinguishes it from "
        f"its neighbors. With one chunk, the prediction would be {plain:.0f}, an error of "
        f"{plain / row.tera - 1:+.1%}. So the model lacks the cost of interleaving there: messages that wait "
        "for each other, or smaller pieces of work."
    )


def _table_5(shares: Shares) -> list[str]:
    lines = [
        "The second table gives seconds per step at the same efficiencies, with full recomputation, and "
        "with sequence parallelism and selective recomputation (Korthikanti et al., 2022). The trivial "
        "predictor gives every row the same FLOP/s as in the first table.",
        "",
        "| parameters, 10⁹ | full, published | predicted | error | trivial | selective, published | "
        "predicted | error | trivial | speedup, published | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors, trivial = [], []
    for row in TABLE_5:
        cells, found = [], []
        for run, published in (
            (row.run, row.full),
            (row.run._replace(kept=SELECTIVE), row.selective),
        ):
            found.append(step_s(run, shares))
            errors.append(found[-1] / published - 1)
            trivial.append(seconds_at(run, FITTED.tera) / published - 1)
            cells += [
                f"{published}",
                f"{found[-1]:.2f}",
                f"{errors[-1]:+.1%}",
                f"{trivial[-1]:+.1%}",
            ]
        cells += [f"{row.full / row.selective:.2f}", f"{found[0] / found[1]:.2f}"]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return [*lines, "", _mean(errors, trivial).capitalize()]


def _mean(errors: list[float], trivial: list[float]) -> str:
    ours, theirs = (sum(map(abs, all_)) / len(all_) for all_ in (errors, trivial))
    return f"the mean error is {ours:.1%}; the trivial predictor's is {theirs:.1%}."


if __name__ == "__main__":
    print(main())
