"""Checks for lesson 08: stages on several GPUs, labels, where to cut a network, and timings."""

import copy
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from helpers import devices
from helpers.checks.core import (
    Wrong,
    exercise,
    expect_close,
    expect_equal,
    expect_gradients,
    expect_tensor,
    expect_whole_number,
    for_input,
)
from helpers.checks.watchers import Leaving
from vgpu.profiling.memory import peaks_during
from vgpu.units import format_bytes


class Network(NamedTuple):
    """Layer widths, the layers, a batch, and the fuller GPU's measured peak for each cut."""

    widths: list[int]
    layers: list[nn.Module]
    batch: torch.Tensor
    peaks: dict[int, int]

    def good_cuts(self) -> set[int]:
        lowest = min(self.peaks.values())
        return {cut for cut, peak in self.peaks.items() if peak <= 1.05 * lowest}


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]


def _train_step(
    layers: Sequence[nn.Module], cut: int, batch: torch.Tensor, gpus: Sequence[torch.device]
) -> None:
    """Run forward and backward, with the first ``cut`` layers on ``gpus[0]``."""
    first = nn.Sequential(*copy.deepcopy(layers[:cut])).to(gpus[0])
    second = nn.Sequential(*copy.deepcopy(layers[cut:])).to(gpus[1])
    second(first(batch.to(gpus[0])).to(gpus[1])).sum().backward()


def _fullest(layers: Sequence[nn.Module], batch: torch.Tensor) -> dict[int, int]:
    """Return the fuller GPU's peak in bytes for each cut."""
    gpus, peaks = devices.lab(2), {}
    for cut in range(1, len(layers)):
        step = partial(_train_step, layers, cut, batch, gpus)
        peaks[cut] = max(peaks_during(step, gpus))
    return peaks


def _even(sizes: Sequence[int]) -> int:
    """Return the cut for which the larger side's total size is smallest."""
    return min(range(1, len(sizes)), key=lambda k: max(sum(sizes[:k]), sum(sizes[k:])))


def _rules(widths: Sequence[int]) -> dict[str, int]:
    """Return the cuts chosen by rules that consider only half of the problem."""
    return {
        "This cut puts the same number of layers on each GPU, but layers differ in size.": (
            len(widths) - 1
        )
        // 2,
        "This cut balances only the parameters: add the activations that forward keeps.": _even(
            _parameters(widths)
        ),
        "This cut balances only the activations: add parameters and gradients.": _even(widths[1:]),
    }


def _parameters(widths: Sequence[int]) -> list[int]:
    return [(a + 1) * b for a, b in pairwise(widths)]


def _told_apart(peaks: dict[int, int], cuts: Sequence[int], failing: int) -> bool:
    """Return whether rule ``failing`` fails, all failures are clear, and failing cuts all differ."""
    lowest = min(peaks.values())
    wrong = [cut for cut in cuts if peaks[cut] > 1.05 * lowest]
    clear = all(peaks[cut] > 1.1 * lowest for cut in wrong)
    return clear and cuts[failing] in wrong and len(set(wrong)) == len(wrong)


def _network(failing: int) -> Network:
    """Return a network for which rule ``failing`` fails, both by estimate and by measurement."""
    while True:
        narrow, wide = random.choice((8, 12, 16)), random.choice((96, 128, 160))
        count = random.randint(6, 9)
        widths = [narrow, *random.choices((narrow, 2 * narrow, wide, 2 * wide), k=count)]
        batch_size = random.choice((64, 128, 256))
        # Weights and gradients, and the output that backward needs.
        sizes = zip(_parameters(widths), widths[1:], strict=True)
        held = [2 * parameters + batch_size * width for parameters, width in sizes]
        fuller = {k: max(sum(held[:k]), sum(held[k:])) for k in range(1, count)}
        cuts = list(_rules(widths).values())
        if not _told_apart(fuller, cuts, failing):
            continue
        layers, batch = _layers(widths), torch.randn(batch_size, narrow)
        peaks = _fullest(layers, batch)
        if _told_apart(peaks, cuts, failing):
            return Network(widths, layers, batch, peaks)


def _networks() -> list[Network]:
    """Return a network per rule. No cut is good enough for all networks, so a constant answer fails."""
    while True:
        networks = [_network(failing) for failing in range(3)]
        if not set.intersection(*(network.good_cuts() for network in networks)):
            return networks


@exercise("8.1", "A network in stages")
def staged(answer: Callable[..., nn.Module]) -> dict[str, str]:
    gpus = devices.lab(3)
    shown = {}
    for count in (3, 2, 3):
        used = random.sample(gpus, count)
        widths = [random.randint(3, 9) for _ in range(count + 1)]
        reference = nn.Sequential(*_layers(widths))
        batch = torch.randn(random.randint(2, 6), widths[0])
        given = f"{count} stages on {', '.join(map(str, used))}, a batch on the CPU"
        with for_input(given, "Stage i runs on gpus[i]: first move its input there."):
            model = answer(list(copy.deepcopy(reference)), used)
            _judge_stages(model, reference, batch, used)
        held = {str(gpu): 0 for gpu in used}
        for parameter in model.parameters():
            held[str(parameter.device)] += parameter.nbytes
        placed = ", ".join(f"{gpu} {format_bytes(size)}" for gpu, size in held.items())
        shown[f"stages of widths {widths}"] = f"parameters: {placed}; same result as on one device"
    return shown


def _judge_stages(
    model: nn.Module,
    reference: nn.Sequential,
    batch: torch.Tensor,
    gpus: Sequence[torch.device],
) -> None:
    mine, theirs = (f"{len(list(each.parameters()))} parameters" for each in (model, reference))
    if mine != theirs:
        hint = "A plain list hides its modules from parameters(): use nn.ModuleList."
        raise Wrong(yours=mine, expected=theirs, hint=hint)
    output, expected = model(batch), reference(batch)
    expect_tensor(output, hint="forward must return the output of the last stage.")
    hint = "Stage i belongs on gpus[i], and the output stays on the last GPU."
    places = [gpu for gpu, stage in zip(gpus, reference, strict=True) for _ in stage.parameters()]
    expect_equal([p.device for p in model.parameters()], places, hint=hint)
    expect_equal(output.device, gpus[-1], hint=hint)
    hint = "The output differs from the output of the same stages on one device."
    expect_close(output.detach().cpu(), expected.detach(), hint=hint)
    expected.sum().backward()
    if output.requires_grad:
        output.sum().backward()
    expect_gradients(model.parameters(), reference.parameters())


@exercise("8.2", "Labels for two losses")
def two_losses(answer: Callable[..., torch.Tensor]) -> dict[str, str]:
    gpus = devices.lab(3)
    shown = {}
    for _ in range(4):
        main_gpu, auxiliary_gpu = random.sample(gpus, 2)
        labels_at = random.choice([*gpus, torch.device("cpu")])
        size, classes = random.randint(20, 40), random.randint(200, 400)
        main, auxiliary = torch.randn(size, classes), torch.randn(size, classes)
        labels = torch.randint(classes, (size,))
        expected = F.cross_entropy(main, labels) + 0.3 * F.cross_entropy(auxiliary, labels)
        given = f"main on {main_gpu}, auxiliary on {auxiliary_gpu}, labels on {labels_at}"
        outputs = [
            main.to(main_gpu).requires_grad_(),
            auxiliary.to(auxiliary_gpu).requires_grad_(),
        ]
        there = labels.to(labels_at)
        with for_input(given, _TWO_DEVICES):
            with Leaving() as leaving:
                yours = answer(*outputs, there)
            hint = (
                "Return the sum of both losses as a tensor: .item() would detach it from the graph."
            )
            expect_tensor(yours, hint=hint)
            hint = (
                "The sum is main + 0.3 * auxiliary, each a cross-entropy averaged over the samples."
            )
            expect_close(yours.detach().cpu(), expected, hint=hint)
            for name, output in zip(("main", "auxiliary"), outputs, strict=True):
                # Per-sample losses may be moved, but not the complete outputs.
                if leaving.numbers[output.device] >= output.numel():
                    raise Wrong(
                        yours=f"the {name} outputs are copied away from {output.device}",
                        expected=f"the {name} loss on {output.device}, where its outputs are",
                        hint="Move the labels, which are small, not the outputs.",
                    )
            hint = "Move the auxiliary loss to the main loss, not the other way around."
            expect_equal(yours.device, main_gpu, hint=hint)
            if yours.requires_grad:
                yours.backward()
            for name, output in zip(("main", "auxiliary"), outputs, strict=True):
                if output.grad is None:
                    raise Wrong(
                        yours=f"no gradient for the {name} outputs",
                        expected="gradients for both outputs",
                        hint="item(), detach() and torch.tensor(...) cut the graph; .to() doesn't.",
                    )
        shown[given] = (
            f"the auxiliary outputs, {format_bytes(auxiliary.nbytes)}, stayed on {auxiliary_gpu}; "
            f"the labels take {format_bytes(labels.nbytes)}"
        )
    return shown


_TWO_DEVICES = (
    "Each loss needs the labels on its own output's device; add the losses on the main output's "
    "device."
)


@exercise("8.3", "Cut where the memory balances")
def balanced_cut(answer: Callable[..., int]) -> dict[str, str]:
    gpus = devices.lab(2)
    # An untouched stub raises here, before anything is measured.
    answer(_layers([4, 4, 4]), torch.randn(2, 4), gpus)
    shown = {}
    for widths, layers, batch, peaks in _networks():
        given = f"linear layers of widths {widths}, a batch of {len(batch)}"
        with for_input(given, "Return how many layers go on the first GPU."):
            yours = answer(copy.deepcopy(layers), batch.clone(), gpus)
            hint = "Return how many layers go on the first GPU; each GPU gets at least one."
            expect_whole_number(yours, 1, len(layers) - 1, hint=hint)
            lowest = min(peaks.values())
            if peaks[yours] > 1.05 * lowest:
                fits = [hint for hint, cut in _rules(widths).items() if cut == yours]
                raise Wrong(
                    yours=f"cut {yours}: {format_bytes(peaks[yours])} on the fuller GPU",
                    expected=f"at most {format_bytes(1.05 * lowest)}",
                    hint=fits[0]
                    if fits
                    else "Measure every cut and choose the one with the lowest peak.",
                )
        half = (len(widths) - 1) // 2
        shown[f"widths {widths}"] = (
            f"cut {yours}: {format_bytes(peaks[yours])} on the fuller GPU; "
            f"best: {format_bytes(lowest)}; half of the layers on each: {format_bytes(peaks[half])}"
        )
    return shown


_ONE_OF_THREE = 'Return "slower", "faster" or "cannot tell".'


@exercise("8.4", "Slower, or just chance?")
def compare(answer: Callable[[list[float], list[float]], str]) -> dict[str, str]:
    seen: Counter[str] = Counter()
    for mean_s in (2.0, 6.0):  # exactly two standard errors of 1 s, no more
        first, second = [1.0, 5.0, 5.0, 5.0], [mean_s] * 2
        given = f"first {first}, second {second}"
        with for_input(given, _ONE_OF_THREE):
            yours = answer(list(first), list(second))
            expect_equal(yours, "cannot tell", hint=_why(yours, first, second))
    while len(seen) < 3:
        first, second = _times(), _times()
        # Just below and above two standard errors, and farther away, in both directions.
        for errors in (1.93, 2.07, *(random.uniform(0.4, 3.5) for _ in range(6))):
            if abs(errors - 2) < 0.05:
                continue
            shift_s = random.choice((-1, 1)) * errors * _error_s(first, second)
            moved = [t - statistics.mean(second) + statistics.mean(first) + shift_s for t in second]
            expected = _verdict(first, moved)
            seen[expected] += 1
            given = f"first {_rounded(first)}, second {_rounded(moved)}"
            with for_input(given, _ONE_OF_THREE):
                yours = answer(list(first), list(moved))
                expect_equal(yours, expected, hint=_why(yours, first, moved))
    return {name: f"{count} pairs of lists, all answered correctly" for name, count in seen.items()}


def _times() -> list[float]:
    mean_s, deviation_s = random.uniform(1, 4), random.uniform(0.05, 0.3)
    return [random.gauss(mean_s, deviation_s) for _ in range(random.randint(2, 9))]


def _rounded(times_s: Sequence[float]) -> list[float]:
    return [round(t, 3) for t in times_s]


def _error_s(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the standard error of the difference between two means."""
    variances = (statistics.variance(times) / len(times) for times in (first, second))
    return float(sum(variances) ** 0.5)


def _verdict(first: Sequence[float], second: Sequence[float]) -> str:
    gap_s = statistics.mean(second) - statistics.mean(first)
    if abs(gap_s) <= 2 * _error_s(first, second):
        return "cannot tell"
    return "slower" if gap_s > 0 else "faster"


def _why(yours: object, first: Sequence[float], second: Sequence[float]) -> str:
    gap_s = statistics.mean(second) - statistics.mean(first)
    error_s = _error_s(first, second)
    numbers = (
        f"The means differ by {gap_s:.3f} s; the standard error of the difference is "
        f"{error_s:.3f} s."
    )
    if yours not in ("slower", "faster", "cannot tell"):
        return _ONE_OF_THREE
    if yours == "cannot tell":
        return (
            f"{numbers} Divide each variance by its number of repeats, add the two, then take the "
            "square root."
        )
    if _verdict(first, second) == "cannot tell":
        return (
            f"{numbers} That's no more than two standard errors. (Use statistics.variance, which "
            "divides by one less than the number of repeats.)"
        )
    return f'{numbers} The answer describes the second list: "slower" if its mean is higher.'
