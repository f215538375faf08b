"""Checks of lesson 11: a step's peak, accumulation over ranks, and a budget for checkpoints."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers import devices
from helpers.checks.core import Wrong, exercise
from helpers.checks.on_ranks import counted, on_ranks
from helpers.memory import peaks_during
from helpers.units import format_bytes

_FLOAT_BYTES = 4


@exercise("11.1", "Say the peak before the run")
def peak_of_a_step(answer: Callable[[list[int], int, str], float]) -> None:
    def some(low: int, high: int) -> int:
        return random.randint(low, high)

    cases = [
        ([64, *(some(200, 500) for _ in range(3)), 10], some(600, 900), "sgd"),  # activations
        ([some(300, 600), some(500, 700), 10], some(8, 16), "adam"),  # the update
        ([64, some(64, 100), some(600, 800), 10], some(300, 600), "adam"),  # the last hidden
        ([64, some(600, 800), *(some(64, 100) for _ in range(3)), 10], some(300, 600), "sgd"),
        ([128, some(64, 128), some(800, 1000)], some(500, 700), "sgd"),  # many classes
        ([some(500, 800), some(500, 800), 64, 10], some(100, 200), random.choice(["sgd", "adam"])),
    ]
    for sizes, batch_size, name in cases:
        given = f"sizes {sizes}, a batch of {batch_size}, {name}"
        yours, expected = answer(list(sizes), batch_size, name), _peak(sizes, batch_size, name)
        if isinstance(yours, bool) or not isinstance(yours, int | float):
            raise Wrong(yours=yours, expected="a number of bytes", given=given)
        if abs(yours / expected - 1) > 0.05:
            raise Wrong(
                yours=f"{format_bytes(yours)} ({yours / expected - 1:+.0%})",
                expected=f"{format_bytes(expected)}, counted, to within 5 %",
                given=given,
                hint=_peak_hint(yours, expected, sizes, batch_size, name),
            )


def _peak(sizes: Sequence[int], batch_size: int, name: str) -> int:
    """What a step holds at its peak, counted: the second of two, so that Adam has its state."""
    (gpu,) = devices.lab(1)
    module = torch.get_device_module(gpu)
    before = module.memory_allocated(gpu)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(gpu)
    x = torch.randn(batch_size, sizes[0], device=gpu)
    y = torch.randint(sizes[-1], (batch_size,), device=gpu)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "adam":
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        module.reset_peak_memory_stats(gpu)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return module.max_memory_allocated(gpu) - before


def _peak_hint(yours: float, expected: int, sizes: Sequence[int], batch: int, name: str) -> str:
    """What a typical wrong formula gives for this case, looked for among the known ones."""
    weights = [i * o + o for i, o in pairwise(sizes)]
    states = 2 if name == "adam" else 0
    always, hidden = sum(weights) * (1 + states), sum(sizes[1:-1]) * batch
    everything = always + sum(weights) + hidden
    update = always + sum(weights) + max(weights) * states + batch * (sizes[0] + 2)
    if yours < expected and abs(update * _FLOAT_BYTES / expected - 1) < 0.02:
        return "Here the peak is in the update: all gradients are there, and Adam's temporaries."
    wrong = {
        "That is the sum of all causes. They are not at their most at the same moment, and what "
        "flows through backward is missing.": (everything, everything + batch * (sizes[0] + 2)),
        "The gradients that flow through backward are missing: one comes in, one goes out.": (
            always + hidden,
            always + hidden + batch * (sizes[0] + 2),
        ),
        "These are numbers; a float32 has 4 bytes.": (expected / _FLOAT_BYTES,),
    }
    for hint, sums in wrong.items():
        unit = 1 if "numbers" in hint else _FLOAT_BYTES
        if any(abs(yours / (total * unit) - 1) < 0.05 for total in sums):
            return hint
    if yours < expected:
        return "Something is missing at the peak: look at the moment after each operation."
    return "Not all of this is there at the same moment: what has been used is freed."


@exercise("11.2", "Accumulate over ranks, unevenly")
def accumulate_over_ranks(answer: Callable[..., None]) -> None:
    ranks = 2
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
        results = on_ranks(_accumulate, ranks, answer, batches, weight, given=given)
        for rank, (gradient, sent, calls, largest) in enumerate(results):
            allowed = max(sizes[rank])
            _judge_rank(rank, gradient, expected, sent, calls, given, batches)
            if largest > allowed:
                raise Wrong(
                    yours=f"a forward of {largest} samples at once on rank {rank}",
                    expected=f"at most {allowed}, its largest micro-batch",
                    given=given,
                    hint="Joined micro-batches need the memory that accumulating saves.",
                )


def _accumulate(
    rank: int,
    world_size: int,
    answer: Callable[..., None],
    batches: list[list[tuple[torch.Tensor, torch.Tensor]]],
    weight: torch.Tensor,
) -> tuple[torch.Tensor, int, list[tuple[str, int]], int]:
    """On a rank: the gradient, how often DDP sent, all collectives, and the largest forward."""
    model = nn.Linear(7, 1, bias=False)
    model.weight.data.copy_(weight)
    parallel = DistributedDataParallel(model)
    sent, largest = [0], [0]
    world = dist.group.WORLD
    assert world is not None

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent[0] += 1
        return allreduce_hook(world, bucket)

    def note_size(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        largest[0] = max(largest[0], len(inputs[0]))

    parallel.register_comm_hook(None, count)
    model.register_forward_pre_hook(note_size)
    _, calls = counted(rank, world_size, lambda *_: answer(parallel, batches[rank]))
    if model.weight.grad is None:
        raise ValueError("accumulate left no gradient: nothing was called backward on")
    return model.weight.grad.clone(), sent[0], calls, largest[0]


def _judge_rank(
    rank: int,
    gradient: torch.Tensor,
    expected: torch.Tensor,
    sent: int,
    calls: list[tuple[str, int]],
    given: str,
    batches: Any,
) -> None:
    by_hand = sum(size >= gradient.numel() for _, size in calls) - sent
    others = [(name, size) for name, size in calls if size < gradient.numel()]
    if sent == 0 or by_hand > 0:
        raise Wrong(
            yours=f"DDP sent gradients {sent} times, and your own code {max(by_hand, 0)} times",
            expected="DDP sends them once",
            given=given,
            hint="Let the last backward be outside of no_sync, its forward too.",
        )
    if not torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6):
        raise Wrong(
            yours=gradient,
            expected=expected,
            given=f"{given}, on rank {rank}",
            hint=_scale_hint(gradient, expected, batches),
        )
    if sent > 1:
        raise Wrong(
            yours=f"gradients sent {sent} times",
            expected="sent once",
            given=given,
            hint="Run all but the last micro-batch, forward and backward, inside no_sync().",
        )
    if len(others) > 1 or any(size > 1 for _, size in others):
        raise Wrong(
            yours=", ".join(f"{name} of {size} numbers" for name, size in others),
            expected="at most one collective, of at most 8 bytes",
            given=given,
            hint="One number per rank is enough: how many samples it has.",
        )


def _scale_hint(gradient: torch.Tensor, expected: torch.Tensor, batches: Any) -> str:
    ratios = gradient / expected
    factor = ratios.median().item()
    if torch.allclose(ratios, torch.full_like(ratios, factor), rtol=1e-3):
        total = sum(len(x) for of_rank in batches for x, _ in of_rank)
        known = {1 / len(batches): "DDP divides by the number of ranks."}
        known[total] = known[total / len(batches)] = "Sums of losses: divide by all samples."
        for value, hint in known.items():
            if abs(factor / value - 1) < 1e-3:
                return f"The gradient is {factor:.3g} times the right one. {hint}"
        return f"The gradient is {factor:.3g} times the right one."
    return (
        "Not every sample has the same weight. A mean of means is not the mean when parts, or "
        "ranks, have different numbers of samples."
    )


_BATCH, _WIDTH = 4096, 16
_UNIT_BYTES = _BATCH * _WIDTH * _FLOAT_BYTES


def _peak_units(layers: Sequence[int], chosen: Sequence[int]) -> int:
    """The most layer outputs at once, with the two that flow back; see the exercise's text."""
    held = most = 0
    for stage, count in enumerate(layers):
        most = max(most, held + count)
        held += 1 if stage in chosen else count
    return most + 2


@exercise("11.3", "Fit a budget with the least recomputation")
def fit_a_budget(answer: Callable[[list[int], int, int], Any]) -> None:
    cases = [[6, 1, 1, 6], [5, 3, 2, 1], [2, 2, 6, 2]]
    cases += [[random.randint(1, 6) for _ in range(random.randint(3, 6))] for _ in range(4)]
    for number, layers in enumerate(cases):
        stages = range(len(layers))
        sets = [set(c) for size in range(len(layers) + 1) for c in combinations(stages, size)]
        peaks = [_peak_units(layers, tuple(chosen)) for chosen in sets]
        # Everything fits in the second case, nothing in the third; else a choice is needed.
        units = random.choice(sorted(set(peaks))[:-1] or peaks)
        units = peaks[0] if number == 1 else min(peaks) - 1 if number == 2 else units
        fits = [c for c, peak in zip(sets, peaks, strict=True) if peak <= units]
        budget = units * _UNIT_BYTES
        given = f"layers {layers}, {format_bytes(_UNIT_BYTES)} an output, {format_bytes(budget)}"
        yours = answer(list(layers), _UNIT_BYTES, budget)
        if yours is None and fits:
            raise Wrong(yours=None, expected="a choice that fits", given=given)
        if not fits:
            if yours is not None:
                raise Wrong(
                    yours=yours,
                    expected=None,
                    given=given,
                    hint="No choice fits: say so by None.",
                )
            continue
        _judge_choice(yours, layers, budget, fits, given)


def _judge_choice(
    yours: Any, layers: Sequence[int], budget: int, fits: Sequence[set[int]], given: str
) -> None:
    indices = list(yours) if isinstance(yours, set | frozenset | list | tuple | range) else None
    whole = indices is not None and all(type(i) is int for i in indices)
    if indices is None or not whole or not set(indices) <= set(range(len(layers))):
        raise Wrong(
            yours=yours, expected=f"indices from 0 to {len(layers) - 1}, or None", given=given
        )
    fewest = min(sum(layers[stage] for stage in chosen) for chosen in fits)
    peak, again = _run_stages(layers, set(indices))
    chose = f"stages {sorted(set(indices))}: {format_bytes(peak)}, {again} layers computed twice"
    # Half an output is room for the parameters' gradients, which the budget does not count.
    if peak > budget + _UNIT_BYTES // 2:
        raise Wrong(
            yours=chose,
            expected=f"at most {format_bytes(budget)}",
            given=given,
            hint="Over the budget. When backward reaches a stage, all of its outputs are there.",
        )
    if again > fewest:
        raise Wrong(
            yours=chose,
            expected=f"{fewest} layers computed twice",
            given=given,
            hint="It fits, and so does a choice that computes less. Mind which stages come late.",
        )


def _run_stages(layers: Sequence[int], chosen: set[int]) -> tuple[int, int]:
    """Peak bytes of a real step with these stages checkpointed, and the layers computed twice."""
    (gpu,) = devices.lab(1)
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    stages = []
    for number in layers:
        made = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(number)]
        for layer in made:
            layer.register_forward_pre_hook(count)
        stages.append(nn.Sequential(*made).to(gpu))
    batch = torch.ones(_BATCH, _WIDTH, device=gpu)

    def step() -> None:
        output = batch
        for index, stage in enumerate(stages):
            if index in chosen:
                output = checkpoint(stage, output, use_reentrant=False)
            else:
                output = stage(output)
        loss, output = output.sum(), batch  # the last output is not held while backward runs
        loss.backward()

    (peak,) = peaks_during(step, [gpu])
    return peak, calls[0] - sum(layers)
