"""Checks for lesson 11: a step's peak, accumulation across ranks, a budget, a tower that fits."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers import devices
from helpers.checks.core import Wrong, exercise, expect_number, for_input
from helpers.checks.on_ranks import on_ranks
from helpers.checks.watchers import WatchedLinear, count_sent, expect_one_micro_batch
from vgpu.profiling import OperatorLog, count_collectives
from vgpu.profiling.memory import Moment, StepRecord, peaks_during
from vgpu.units import format_bytes

_FLOAT_BYTES = 4


@exercise("11.1", "Predict a step's peak")
def peak_of_a_step(answer: Callable[[list[int], int, str], float]) -> dict[str, str]:
    shown: dict[str, str] = {}
    cases = _networks()
    for number, (sizes, batch_size, name) in enumerate(cases, 1):
        given = f"sizes {sizes}, a batch of {batch_size}, {name} (case {number} of {len(cases)})"
        with for_input(given, _FROM_SIZES), OperatorLog() as calls:
            yours = answer(list(sizes), batch_size, name)
            expect_number(yours, "a number of bytes")
        if calls.names:
            raise Wrong(
                yours=f"an answer that runs {len(calls.names)} PyTorch operations",
                expected="no tensors, only arithmetic with the sizes",
                given=given,
                hint="That measures a run instead of predicting it. Which tensors are there, and "
                "how many elements does each have?",
            )
        peak = _peak(sizes, batch_size, name)
        off = yours / peak.total_bytes - 1
        if not abs(off) <= 0.05:
            raise Wrong(
                yours=f"{format_bytes(yours)} ({off:+.0%})",
                expected=f"within 5% of the counted {format_bytes(peak.total_bytes)}",
                given=given,
                hint=_peak_hint(yours, peak),
            )
        shown[f"case {number}"] = (
            f"{format_bytes(yours)}, counted {format_bytes(peak.total_bytes)} in {peak.phase}"
        )
    return shown


_FROM_SIZES = "Return the bytes as one number, computed from the sizes only."


def _networks() -> list[tuple[list[int], int, str]]:
    """Return sizes, batch size and optimizer per case: first as in the lesson, then harder ones."""

    def some(low: int, high: int) -> int:
        return random.randint(low, high)

    width = some(200, 500)
    return [
        # as in the lesson, without optimizer state
        ([64, width, width, 10], some(600, 900), "sgd"),
        ([64, width, width, width, 10], some(600, 900), "adam"),
        ([some(300, 600), some(500, 700), 10], some(8, 16), "adam"),  # peak in the update
        ([64, some(64, 100), some(600, 800), 10], some(300, 600), "sgd"),  # last hidden layer
        ([64, some(600, 800), some(64, 100), some(64, 100), 10], some(300, 600), "adam"),
        ([128, some(64, 128), some(800, 1000)], some(500, 700), "sgd"),  # many classes
        # Most of the memory is the batch, which doesn't need a gradient.
        ([some(1450, 1550), some(75, 85), 10], some(440, 460), "sgd"),
        # A weight gradient that's larger than the activations.
        ([some(250, 260), some(1000, 1050), 10], some(60, 68), "sgd"),
    ]


def _peak(sizes: Sequence[int], batch_size: int, name: str) -> Moment:
    """Return the second step's moment of peak memory: by then, Adam has its state."""
    (gpu,) = devices.lab(1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(gpu)
    x = torch.randn(batch_size, sizes[0], device=gpu)
    y = torch.randint(sizes[-1], (batch_size,), device=gpu)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "adam":
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(phase: Callable[[str], None]) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        phase("backward")
        loss.backward()
        phase("update")
        optimizer.step()

    step(lambda _: None)
    with StepRecord(model, optimizer, [x, y]) as record:
        step(record.phase)
    return record.peak


def _peak_hint(yours: float, peak: Moment) -> str:
    """Say when the peak is and what it consists of, or that elements were mistaken for bytes."""
    held = ", ".join(
        f"{cause} {format_bytes(size)}" for cause, size in peak.by_cause.items() if size
    )
    hint = f"The peak is in {peak.phase}, at {peak.operation}. In memory at that moment: {held}."
    if abs(yours * _FLOAT_BYTES / peak.total_bytes - 1) < 0.05:
        return f"You counted elements, not bytes; a float32 takes 4 bytes. {hint}"
    return hint


@exercise("11.2", "Accumulate across ranks, unevenly")
def accumulate_over_ranks(answer: Callable[..., None]) -> dict[str, str]:
    ranks = 2
    shown = {}
    for counts in ([random.randint(2, 3)] * ranks, random.sample(range(1, 5), ranks)):
        sizes = [[random.randint(1, 6) for _ in range(count)] for count in counts]
        batches = [
            [(torch.randn(size, 7), torch.randn(size, 1)) for size in of_rank] for of_rank in sizes
        ]
        weight = torch.randn(1, 7)
        given = " and ".join(f"micro-batches of {of_rank}" for of_rank in sizes)
        given = f"{ranks} ranks with {given} samples"
        every = [batch for of_rank in batches for batch in of_rank]
        x, y = (torch.cat(part) for part in zip(*every, strict=True))
        expected = 2 * ((x @ weight.T - y) * x).mean(0, keepdim=True)
        with for_input(given, "Every rank accumulates over its own micro-batches."):
            results = on_ranks(_accumulate, ranks, answer, batches, weight, given=given, gpu=None)
        for rank, (gradient, sent, calls, largest, held) in enumerate(results):
            with for_input(f"{given}, on rank {rank}"):
                _judge_rank(gradient, expected, sent, calls, batches)
                expect_one_micro_batch(largest, max(sizes[rank]), held)
            others = [f"{name} of {size}" for name, size in calls if size < weight.numel()]
            shown[f"rank {rank}, {len(sizes[rank])} micro-batches"] = (
                f"gradient all-reduces: {sent}; other collectives: {', '.join(others) or 'none'}; "
                f"largest forward: {largest} of {sum(sizes[rank])} samples"
            )
    return shown


def _accumulate(
    rank: int,
    world_size: int,
    answer: Callable[..., None],
    batches: list[list[tuple[torch.Tensor, torch.Tensor]]],
    weight: torch.Tensor,
) -> tuple[torch.Tensor | None, int, list[tuple[str, int]], int, int]:
    """On a rank, return the gradient, the number of DDP's reductions, all collectives, the size of
    the largest forward, and the largest number of earlier graphs still alive during a forward.
    """
    model = WatchedLinear(7, 1, bias=False)
    model.weight.data.copy_(weight)
    parallel = DistributedDataParallel(model)
    sent = count_sent(parallel)
    _, calls = count_collectives(rank, world_size, lambda *_: answer(parallel, batches[rank]))
    largest, held = max(model.samples, default=0), max(model.graphs_held, default=0)
    return model.weight.grad, len(sent), calls, largest, held


def _judge_rank(
    gradient: torch.Tensor | None,
    expected: torch.Tensor,
    sent: int,
    calls: list[tuple[str, int]],
    batches: Any,
) -> None:
    if gradient is None:
        raise Wrong(
            yours="no gradient",
            expected="a gradient in .grad on every rank",
            hint="Call backward() on the loss of each micro-batch.",
        )
    by_hand = sum(size >= gradient.numel() for _, size in calls) - sent
    others = [(name, size) for name, size in calls if size < gradient.numel()]
    if sent == 0 or by_hand > 0:
        raise Wrong(
            yours=f"DDP reduced gradients {sent} times, your own code {max(by_hand, 0)} times",
            expected="DDP reduces them once",
            hint="Run the last micro-batch, forward and backward, outside no_sync.",
        )
    if not torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6):
        hint = _scale_hint(gradient, expected, batches)
        raise Wrong(yours=gradient, expected=expected, hint=hint)
    if sent > 1:
        raise Wrong(
            yours=f"gradients reduced {sent} times",
            expected="gradients reduced once",
            hint="Run all but the last micro-batch, forward and backward, inside no_sync().",
        )
    if len(others) > 1 or any(size > 1 for _, size in others):
        raise Wrong(
            yours=", ".join(f"{name} of {size} elements" for name, size in others),
            expected="at most one collective, of at most 8 bytes",
            hint="One value per rank is enough: its number of samples.",
        )


def _scale_hint(gradient: torch.Tensor, expected: torch.Tensor, batches: Any) -> str:
    ratios = gradient / expected
    factor = ratios.median().item()
    if torch.allclose(ratios, torch.full_like(ratios, factor), rtol=1e-3):
        total = sum(len(x) for of_rank in batches for x, _ in of_rank)
        known = {1 / len(batches): "DDP divides by the number of ranks."}
        known[total] = known[total / len(batches)] = (
            "Divide the sum by the total number of samples."
        )
        for value, hint in known.items():
            if abs(factor / value - 1) < 1e-3:
                return f"The gradient is {factor:.3g} times the right one. {hint}"
        return f"The gradient is {factor:.3g} times the right one."
    return (
        "Not every sample has the same weight. A mean of means isn't the overall mean if parts "
        "or ranks have different numbers of samples."
    )


_BATCH, _WIDTH = 4096, 16
_UNIT_BYTES = _BATCH * _WIDTH * _FLOAT_BYTES


def _peak_units(layers: Sequence[int], chosen: Sequence[int]) -> int:
    """Return the most layer outputs held at once, including backward's two, as in the exercise."""
    held = most = 0
    for stage, count in enumerate(layers):
        most = max(most, held + count)
        held += 1 if stage in chosen else count
    return most + 2


@exercise("11.3", "Fit a budget with the least recomputation")
def fit_a_budget(answer: Callable[[list[int], int, int], Any]) -> dict[str, str]:
    cases = [[6, 1, 1, 6], [5, 3, 2, 1], [2, 2, 6, 2], [6, 3, 3, 5]]
    cases += [[random.randint(1, 6) for _ in range(random.randint(3, 6))] for _ in range(4)]
    shown: dict[str, str] = {}
    for number, layers in enumerate(cases):
        stages = range(len(layers))
        sets = [set(c) for size in range(len(layers) + 1) for c in combinations(stages, size)]
        peaks = [_peak_units(layers, tuple(chosen)) for chosen in sets]
        # Everything fits in the second case, nothing in the third; in the fourth, the fewest
        # stages don't have the fewest layers. In the others, some stages must be checkpointed.
        units = random.choice(sorted(set(peaks))[:-1] or peaks)
        units = {1: peaks[0], 2: min(peaks) - 1, 3: 17}.get(number, units)
        fits = [c for c, peak in zip(sets, peaks, strict=True) if peak <= units]
        budget = units * _UNIT_BYTES
        given = (
            f"layers {layers}, {format_bytes(_UNIT_BYTES)} per output, "
            f"a budget of {format_bytes(budget)}"
        )
        with for_input(given, "Return the indices of the stages to checkpoint, or None."):
            yours = answer(list(layers), _UNIT_BYTES, budget)
            if fits:
                shown[f"layers {layers}, {format_bytes(budget)}"] = _judge_choice(
                    yours, layers, budget, fits
                )
            elif yours is not None:
                least = format_bytes(min(peaks) * _UNIT_BYTES)
                hint = "No choice fits: return None. With every stage checkpointed, the peak is "
                raise Wrong(
                    yours=repr(yours),
                    expected="None",
                    hint=f"{hint}{least}: checkpointed or not, all outputs of a stage are in memory "
                    "when backward reaches it.",
                )
    return shown


def _in_words(layers: Sequence[int], chosen: set[int]) -> str:
    """Describe a choice and what a real step needs with it."""
    peak, again = _run_stages(layers, chosen)
    return f"stages {sorted(chosen)}: {format_bytes(peak)}, {again} layers computed twice"


def _judge_choice(yours: Any, layers: Sequence[int], budget: int, fits: Sequence[set[int]]) -> str:
    """Run the choice and describe what it needs; raise Wrong if that's too much."""
    if yours is None:
        fitting = min(fits, key=lambda chosen: sum(layers[stage] for stage in chosen))
        raise Wrong(
            yours="None",
            expected=f"a choice that fits, such as {_in_words(layers, fitting)}",
            hint="The stages' total may exceed the budget: backward frees a stage before it "
            "recomputes the previous one.",
        )
    indices = list(yours) if isinstance(yours, set | frozenset | list | tuple | range) else None
    whole = indices is not None and all(type(i) is int for i in indices)
    if indices is None or not whole or not set(indices) <= set(range(len(layers))):
        expected = f"indices from 0 to {len(layers) - 1}, or None"
        raise Wrong(yours=repr(yours), expected=expected, hint="Stages are counted from 0.")
    fewest = min(sum(layers[stage] for stage in chosen) for chosen in fits)
    peak, again = _run_stages(layers, set(indices))
    chose = _in_words(layers, set(indices))
    # Half an output leaves room for the parameters' gradients, which the budget doesn't count.
    if peak > budget + _UNIT_BYTES // 2:
        raise Wrong(
            yours=chose,
            expected=f"at most {format_bytes(budget)}, as with {_in_words(layers, fits[0])}",
            hint="Over the budget. When backward reaches a stage, all its outputs are in memory.",
        )
    if again > fewest:
        raise Wrong(
            yours=chose,
            expected=f"{fewest} layers computed twice",
            hint="It fits, but so does a choice that recomputes less. Which stages come late?",
        )
    return chose


def _run_stages(layers: Sequence[int], chosen: set[int]) -> tuple[int, int]:
    """Return a step's peak bytes with these stages checkpointed, and the number of layers rerun."""
    (gpu,) = devices.lab(1)
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    stages = []
    for number in layers:
        stage = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(number)]
        for layer in stage:
            layer.register_forward_pre_hook(count)
        stages.append(nn.Sequential(*stage).to(gpu))
    batch = torch.ones(_BATCH, _WIDTH, device=gpu)

    def step() -> None:
        output = batch
        for index, stage in enumerate(stages):
            if index in chosen:
                output = checkpoint(stage, output, use_reentrant=False)
            else:
                output = stage(output)
        loss, output = output.sum(), batch  # don't hold the last output while backward runs
        loss.backward()

    (peak,) = peaks_during(step, [gpu])
    return peak, calls[0] - sum(layers)


class _Residual(nn.Module):
    """A block as in the lesson; it records how many samples each forward gets."""

    def __init__(self, width: int, samples: list[int]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.samples = samples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples.append(len(x))
        return x + F.relu(self.linear(self.norm(x)))


_BLOCKS, _SAMPLES, _LEAST_PART, _MOST_BYTES = 24, 16_384, 4096, 40 * 2**20


@exercise("11.4", "Make the tower fit")
def make_the_tower_fit(answer: Callable[[nn.Module, torch.Tensor], Any]) -> dict[str, str]:
    (gpu,) = devices.lab(1)
    samples: list[int] = []
    tower = nn.Sequential(*(_Residual(64, samples) for _ in range(_BLOCKS))).to(gpu)
    x = torch.randn(_SAMPLES, 64, device=gpu)
    tower(x).square().mean().backward()
    expected = [parameter.grad for parameter in tower.parameters()]
    tower.zero_grad()
    samples.clear()
    given = f"{_BLOCKS} blocks, {_SAMPLES:,} samples"
    held_bytes = x.nbytes + sum(parameter.nbytes for parameter in tower.parameters())
    with for_input(given, "Leave the same gradients in .grad, with less memory."):
        (peak,) = peaks_during(lambda: answer(tower, x), [gpu])
        peak += held_bytes
        runs = sum(samples) / (_BLOCKS * _SAMPLES)
        _judge_gradients([parameter.grad for parameter in tower.parameters()], expected)
        if min(samples) < _LEAST_PART:
            raise Wrong(
                yours=f"a part of {min(samples):,} samples",
                expected=f"parts of at least {_LEAST_PART:,}",
                hint="Small parts leave the GPU idle. Save the rest by checkpointing.",
            )
        if peak > _MOST_BYTES:
            raise Wrong(
                yours=f"{format_bytes(peak)} at the peak",
                expected=f"at most {format_bytes(_MOST_BYTES)}",
                hint=_tower_hint(samples, runs),
            )
        if runs > 2:
            raise Wrong(
                yours=f"each block runs forward {runs:.1f} times on each sample",
                expected="at most twice",
                hint="Once in forward, and once more in backward: don't nest checkpoints, and call "
                "forward once per part.",
            )
    return {
        "peak": f"{format_bytes(peak)}, of {format_bytes(_MOST_BYTES)}",
        "largest part": f"{max(samples):,} of {_SAMPLES:,} samples",
        "forwards of a block on each sample": f"{runs:.2f}",
    }


def _judge_gradients(
    yours: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> None:
    for mine, right in zip(yours, expected, strict=True):
        assert right is not None
        if mine is None:
            raise Wrong(
                yours="a parameter without a gradient",
                expected="a gradient for every parameter",
                hint="Call backward() on each part's loss, and don't call zero_grad after it.",
            )
        if not torch.allclose(mine, right, rtol=1e-3, atol=1e-3 * right.abs().max().item()):
            ratio = (mine.norm() / right.norm()).item()
            raise Wrong(
                yours=f"a gradient {ratio:.3g} times as large as the right one",
                expected="the same gradient as in one step on the whole batch",
                hint="The mean over the batch is the mean of the k parts' means: divide each part's "
                "loss by k, once, and use every part.",
            )


def _tower_hint(samples: Sequence[int], runs: float) -> str:
    if max(samples) == _SAMPLES:
        return "The whole batch runs at once. Split it into parts, and call backward on each."
    if runs <= 1:
        return "Each part keeps all its activations. Checkpoint segments of the tower, too."
    return (
        "You use both methods. Does each part's backward run before the next part's forward? Are "
        "the parts as small as allowed? And for 24 blocks, how many segments are best?"
    )
