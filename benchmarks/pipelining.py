"""Two stages in two processes: torch.distributed.pipelining compared with the same stages in turn.

Each process has one thread. "In turn" means that one micro-batch at a time goes through both stages,
forward and backward, before the next begins: it's the same schedule class with a single micro-batch,
so only the overlap differs. Every repeat runs all variants, one after the other, so load from
other programs affects all of them. Every repeat also measures the machine: how much faster two processes
that only compute run in parallel than one after the other. ``python -m benchmarks pipelining``
writes the result to RESULTS.md.
"""

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from vgpu import launch

MICRO_BATCHES = (4, 8, 16)
ROWS, WIDTH, LAYERS = 64, 512, 6  # ROWS per micro-batch; LAYERS per stage
REPEATS = 15


def make_stages() -> list[nn.Module]:
    """Two stages of the same size, with the same weights in every process."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
        for _ in range(2)
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target, reduction="sum")


def compute(stage: nn.Module, parts: tuple[torch.Tensor, ...]) -> None:
    """Run all forward and backward passes of a stage, without communication."""
    for part in parts:
        loss(stage(part), part).backward()


def cores_s(rank: int, stage: nn.Module, parts: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Return the seconds if the two ranks compute one after the other, and at the same time."""
    marks_s = []
    for turns in ((0, 1), (None,)):
        dist.barrier()
        begin_s = time.perf_counter()
        for turn in turns:
            if turn in (rank, None):
                compute(stage, parts)
            dist.barrier()
        marks_s.append(time.perf_counter() - begin_s)
    return marks_s[0], marks_s[1]


def rank_times(rank: int, world_size: int, micro_batches: int) -> dict[str, list[float]]:
    """Return each variant's seconds in each repeat, after comparing all variants' gradients."""
    torch.set_num_threads(1)
    stage = PipelineStage(make_stages()[rank], rank, world_size, torch.device("cpu"))
    torch.manual_seed(1)
    x, y = torch.randn(2, micro_batches * ROWS, WIDTH)
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    one = ScheduleGPipe(stage, 1, **options)
    ways = {
        "in turn": (one, x.chunk(micro_batches), y.chunk(micro_batches)),
        "GPipe": (ScheduleGPipe(stage, micro_batches, **options), [x], [y]),
        "1F1B": (Schedule1F1B(stage, micro_batches, **options), [x], [y]),
    }
    times_s: dict[str, list[float]] = {way: [] for way in (*ways, "one by one", "beside")}
    for repeat in range(REPEATS + 2):
        gradients = []
        for way, (schedule, inputs, targets) in ways.items():
            stage.submod.zero_grad()
            dist.barrier()
            begin_s = time.perf_counter()
            for part, target in zip(inputs, targets, strict=True):
                schedule.step(part) if rank == 0 else schedule.step(target=target)
            dist.barrier()
            if repeat >= 2:  # the first two infer shapes, and warm up
                times_s[way].append(time.perf_counter() - begin_s)
            gradients.append([parameter.grad for parameter in stage.submod.parameters()])
        for other in gradients[1:]:
            torch.testing.assert_close(other, gradients[0])
        one_by_one_s, beside_s = cores_s(rank, stage.submod, x.chunk(micro_batches))
        if repeat >= 2:
            times_s["one by one"].append(one_by_one_s)
            times_s["beside"].append(beside_s)
    return times_s


def row(micro_batches: int) -> list[str]:
    """Return the table's lines for one number of micro-batches."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    times_s = launch.run(rank_times, 2, micro_batches)[0]
    best = 2 * micro_batches / (micro_batches + 1)
    machine = statistics.median(
        a / b for a, b in zip(times_s["one by one"], times_s["beside"], strict=True)
    )
    lines = []
    for way in ("GPipe", "1F1B"):
        ratios = [a / b for a, b in zip(times_s["in turn"], times_s[way], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median_ms = 1e3 * statistics.median(times_s[way])
        turn_ms = 1e3 * statistics.median(times_s["in turn"])
        lines.append(
            f"| {micro_batches} | {way} | {turn_ms:.0f} | {median_ms:.0f} | {middle:.2f} "
            f"| {low:.2f} to {high:.2f} | {best:.2f} | {machine:.2f} | {load} |"
        )
    return lines


def main() -> str:
    """Return the section of RESULTS.md."""
    return "\n".join(
        [
            "## Pipelining in two processes",
            "",
            "Two processes with one thread each run the forward and backward passes of a training "
            f"step, one stage per process ({LAYERS} layers of width {WIDTH} per stage, {ROWS} rows "
            "per micro-batch). torch.distributed.pipelining over gloo is compared with running the "
            f"same stages in turn, one micro-batch at a time. Times are medians of {REPEATS} "
            "repeats. *Speedup* is the median of the ratios within each repeat, and *middle half* "
            "is the range of the middle half of these ratios. The bound for m micro-batches is 2 m "
            "/ (m + 1), with two idle cores and no copies. *Machine* is how many times faster the "
            "two stages compute at the same time than one after the other, without sending "
            "anything, measured in the same repeats: 2 with two idle cores, and less when other "
            "programs use them. *Load* is the average number of runnable processes in the minute "
            "before.",
            "",
            "| micro-batches | schedule | in turn, ms | pipeline, ms | speedup | middle half "
            "| bound | machine | load |",
            "|---|---|---|---|---|---|---|---|---|",
            *[line for micro_batches in MICRO_BATCHES for line in row(micro_batches)],
            "",
            "Every repeat checks that GPipe, 1F1B and the stages in turn compute the same gradients.",
        ]
    )


if __name__ == "__main__":
    print(main())
