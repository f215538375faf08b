"""Checks for lesson 05: DataParallel's parts, memory, counters and checkpoints."""

import copy
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

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
    expect_graph,
    expect_tensor,
    for_input,
)
from helpers.checks.describing import describe
from vgpu.profiling.memory import peaks_during
from vgpu.units import format_bytes


class _Noting(nn.Module):
    """A small network that records each replica's GPU, thread, and number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.seen: list[tuple[str, int]] = []
        self.threads: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((str(x.device), len(x)))
        self.threads.append(threading.get_ident())
        out: torch.Tensor = self.layers(x)
        return out


@contextmanager
def _without_the_ready_made() -> Iterator[None]:
    """Make ``nn.DataParallel`` and ``nn.parallel.data_parallel`` unusable inside the block."""
    # The function may already have been imported elsewhere, so patch scatter_kwargs, the first
    # function that it calls, in its module.
    function = sys.modules["torch.nn.parallel.data_parallel"]
    with (
        patch.object(nn.DataParallel, "__init__", _refuse),
        patch.object(function, "scatter_kwargs", _refuse),
    ):
        yield


def _refuse(*_: Any, **__: Any) -> None:
    raise Wrong(
        yours="a call to PyTorch's own DataParallel",
        expected="its four parts, called by your code",
        hint="Use scatter, replicate, parallel_apply and gather.",
    )


@exercise("5.1", "DataParallel from its four parts")
def from_four_parts(answer: Callable[..., torch.Tensor]) -> dict[str, Any]:
    gpus = devices.lab(3)
    apart = 0.0
    seen: list[tuple[str, int]] = []
    for count, size in ((2, 2 * random.randint(3, 9) + 1), (3, 12), (3, 2)):
        hint = (
            "parallel_apply takes as many replicas as chunks, and a small batch has fewer chunks "
            "than there are GPUs."
        )
        with for_input(f"a batch of {size} on {count} GPUs", hint):
            off, seen = _judge_parts(answer, gpus[:count], torch.randn(size, 6))
        apart = max(apart, off)
    return {
        "2 samples on 3 GPUs": _samples(seen),
        "largest difference from a single GPU": f"{apart:.1e}, across all gradients of 3 batches",
    }


def _judge_parts(
    answer: Callable[..., torch.Tensor], gpus: list[torch.device], x: torch.Tensor
) -> tuple[float, list[tuple[str, int]]]:
    """Return the largest difference from a single GPU's gradients, and each GPU's sample count."""
    single = _Noting()
    module = copy.deepcopy(single).to(gpus[0])
    expected = single(x)
    expected.square().sum().backward()
    module.seen.clear()
    results: list[Any] = []
    batch = x.to(gpus[0])
    with _without_the_ready_made():
        peaks = peaks_during(lambda: results.append(answer(module, batch, gpus)), gpus)
    yours = results.pop()
    expect_tensor(yours, hint="Return what gather returns.")
    if yours.device != gpus[0]:
        raise Wrong(
            yours=f"an output on {yours.device}",
            expected=f"an output on {gpus[0]}",
            hint="gather takes the device on which the outputs are joined.",
        )
    hint = "Call the four parts with gradients enabled, and don't detach anything."
    expect_graph(yours, "an output", hint)
    chunks = [(str(g), len(chunk)) for g, chunk in zip(gpus, x.chunk(len(gpus)), strict=False)]
    seen = sorted(module.seen)
    if seen != chunks:
        raise Wrong(
            yours=_samples(seen),
            expected=_samples(chunks),
            hint="Each GPU runs its own chunk once: scatter first, then parallel_apply.",
        )
    if threading.get_ident() in module.threads:
        raise Wrong(
            yours="replicas that run one after the other, in the calling thread",
            expected="each replica in its own thread",
            hint="parallel_apply starts the threads: pass it the replicas and the chunks.",
        )
    idle = list(zip(gpus, peaks, strict=True))[len(chunks) :]
    if extra := [str(gpu) for gpu, peak in idle if peak]:
        raise Wrong(
            yours=f"memory allocated on {', '.join(extra)}, too",
            expected="no more replicas than chunks",
            hint="replicate makes one replica for each device in its list: shorten the list first.",
        )
    hint = "The output differs from what a single GPU computes for the full batch."
    expect_close(yours.cpu(), expected, hint=hint)
    yours.square().sum().backward()
    hint = "A gradient differs from what a single GPU computes: is everything in the graph?"
    return expect_gradients(module.parameters(), single.parameters(), hint), seen


def _samples(seen: list[tuple[str, int]]) -> str:
    return ", ".join(f"{size} on {device}" for device, size in seen) or "no forward pass at all"


class _WithLoss(nn.Module):
    """The reference: each replica returns its own chunk's summed loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.module(batch), labels, reduction="sum").unsqueeze(0)


@exercise("5.2", "Return the loss")
def with_loss(answer: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    gpus = devices.lab(2)
    size = 2 * random.randint(90, 110) + 1
    batch, labels = torch.randn(size, 64), torch.randint(2000, (size,))
    # There are so few parameters that outputs, not summed gradients, determine the peaks.
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 2000))
    single = copy.deepcopy(model)
    F.cross_entropy(single(batch), labels).backward()

    def gathered(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(nn.DataParallel(module, gpus)(x), y).backward()

    def in_forward(wrapper: Callable[[nn.Module], nn.Module]) -> Callable[..., None]:
        def step(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
            (nn.DataParallel(wrapper(module), gpus)(x, y).sum() / len(x)).backward()

        return step

    def peaks_of(step: Callable[..., None]) -> tuple[list[int], nn.Module]:
        module = copy.deepcopy(model).to(gpus[0])
        x, y = batch.to(gpus[0]), labels.to(gpus[0])
        return peaks_during(lambda: step(module, x, y), gpus), module

    with for_input(f"{size} samples on one GPU, without DataParallel"):
        _judge_loss(answer, copy.deepcopy(model).to(gpus[0]), batch.to(gpus[0]), labels)
    # The budget is halfway between two measured peaks, so it doesn't depend on the allocator.
    usual = max(peaks_of(gathered)[0])
    budget = (usual + max(peaks_of(in_forward(_WithLoss))[0])) // 2
    with for_input(f"a batch of {size}, 2,000 outputs per sample, 2 GPUs"):
        peaks, module = peaks_of(in_forward(answer))
        _judge_mean_gradients(module, single)
        if max(peaks) > budget:
            raise Wrong(
                yours=_peaks(gpus, peaks),
                expected=f"at most {format_bytes(budget)} on each",
                hint="One GPU holds more than its own chunk's outputs. Compute each loss where the "
                "outputs are, and don't keep the outputs.",
            )
    return {
        "your peaks": _peaks(gpus, peaks),
        "with outputs gathered": f"{format_bytes(usual)} on {gpus[0]}",
    }


def _peaks(gpus: list[torch.device], peaks: list[int]) -> str:
    return ", ".join(f"{gpu}: {format_bytes(peak)}" for gpu, peak in zip(gpus, peaks, strict=True))


def _judge_loss(
    answer: Callable[[nn.Module], nn.Module], module: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Raise Wrong unless the wrapped module returns the summed loss, of shape (1,)."""
    y = y.to(x.device)
    expected = _WithLoss(module)(x, y)
    inside: Any = answer(module)
    if not isinstance(inside, nn.Module):
        raise Wrong(yours=inside, expected="a module", hint="Pass the class WithLoss to check.")
    yours: Any = inside(x, y)
    expect_tensor(yours, hint="Return the loss as a tensor with its graph: don't call .item().")
    if yours.shape != (1,):
        hint = "One value from each GPU: compute the loss in forward, summed over the chunk."
        if not yours.shape:
            hint = (
                "Outputs are joined along dimension 0, which a 0-dim tensor doesn't have: "
                "add one with unsqueeze(0)."
            )
        raise Wrong(yours=f"shape {tuple(yours.shape)}", expected="shape (1,)", hint=hint)
    hint = "Don't detach the loss, and compute it with gradients enabled."
    expect_graph(yours, "a loss", hint)
    hint = "Return F.cross_entropy of the module's outputs, summed over the chunk."
    if torch.allclose(yours * len(x), expected, rtol=1e-3):
        hint = (
            "That's the mean over the chunk. The step adds up the losses and divides by the batch "
            "size, so return the sum: with chunks of different sizes, the mean of the means is wrong."
        )
    expect_close(yours, expected, hint=hint, rtol=1e-3, atol=1e-3)


def _judge_mean_gradients(module: nn.Module, single: nn.Module) -> None:
    """Raise Wrong unless the gradients match those of the mean loss, apart from rounding."""
    for (name, mine), theirs in zip(module.named_parameters(), single.parameters(), strict=True):
        hint = f"The gradient of {name} differs from that of the mean loss over the full batch."
        if mine.grad is None:
            hint = "The loss must go through self.module, the replica's own copy."
            raise Wrong(yours="no gradient", expected="a gradient", hint=hint)
        assert theirs.grad is not None
        if not torch.allclose(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-6):
            apart = (mine.grad.cpu() - theirs.grad).abs().max().item()
            raise Wrong(
                yours=f"a gradient of {name} that is off by up to {apart:.2g}",
                expected=f"a single GPU's gradient, within {1e-3 * theirs.grad.abs().max().item():.2g}",
                hint=hint,
            )


@exercise("5.3", "A counter that survives")
def counting_model(answer: Callable[[], nn.Module]) -> dict[str, Any]:
    gpus = devices.lab(3)
    counted: dict[str, str] = {}
    # All GPUs, all but GPU 0, one GPU, and no GPU at all.
    for used in (gpus, gpus[:0:-1], random.sample(gpus, 1), []):
        batches = random.randint(2, 5)
        where = ", ".join(map(str, used)) or "the CPU, without DataParallel"
        given = f"{batches} batches on {where}"
        hint = (
            "Try it without DataParallel first: model = CountingModel(); model(torch.ones(6, 2))."
        )
        with for_input(given, hint):
            model = answer().to(used[0] if used else "cpu")
            parallel = nn.DataParallel(model, used) if used else model
            for _ in range(batches):
                x = torch.randn(6, 2)
                output = parallel(x.to(used[0] if used else "cpu"))
                expect_close(output.cpu(), x * 2, hint="forward must still double x.")
            _judge_calls(model, batches, replicas=len(used), moved=bool(counted))
        counted[given] = f"calls = {batches}"
    return counted


def _judge_calls(model: nn.Module, batches: int, replicas: int, moved: bool) -> None:
    """Raise Wrong unless ``model.calls`` equals the number of batches and is saved.

    ``moved`` means that the count was already right on other devices.
    """
    calls = getattr(model, "calls", None)
    one = isinstance(calls, torch.Tensor) and calls.numel() == 1
    if not one and not isinstance(calls, int | float):
        raise Wrong(
            yours=f"model.calls is {describe(calls)}",
            expected="a number, or a tensor with one element",
            hint="The check compares int(model.calls).",
        )
    yours = int(calls)  # type: ignore[arg-type]
    hint = "Plain attributes are changed on the replicas, which are thrown away."
    if yours == batches * replicas and replicas > 1:
        hint = "You count once per replica; count once per batch."
    elif moved and yours == 0:
        hint = "The device doesn't matter: forward must count every batch, wherever it runs."
    elif isinstance(calls, torch.Tensor) and yours == 0:
        hint = "A new tensor on the replica is lost, too: change the buffer in place."
    expect_equal(yours, batches, hint=hint)
    if "calls" not in model.state_dict():
        raise Wrong(
            yours=f"a state_dict with {list(model.state_dict()) or 'nothing'}",
            expected="a state_dict with 'calls'",
            hint="Only parameters and persistent buffers are in the state_dict.",
        )


@exercise("5.4", "Load any checkpoint into any model")
def load_any(answer: Callable[[nn.Module, dict[str, torch.Tensor]], str]) -> dict[str, Any]:
    gpus = devices.lab(2)

    def model(kind: str, parts: Sequence[str]) -> nn.Module:
        bare = nn.ModuleDict({name: nn.Linear(3, 3) for name in parts}).to(gpus[0])
        return nn.DataParallel(bare, gpus) if kind == "wrapped" else bare

    cases = [
        ("wrapped", "bare", "prefix removed"),
        ("bare", "wrapped", "prefix added"),
        ("wrapped", "wrapped", "as is"),
        ("bare", "bare", "as is"),
    ]
    # If a submodule is itself called "module", only a key's first "module." can be the prefix; if
    # it's the only submodule, all keys of a bare model start with "module.".
    for parts, (source, into, expected) in product((["body", "module"], ["module"]), cases):
        given = f"the state_dict of a {source} model, loaded into a {into} one, with the submodules {parts}"
        state, target = model(source, parts).state_dict(), model(into, parts)
        before = dict(state)
        with for_input(given):
            try:
                yours = answer(target, state)
            except NotImplementedError:
                raise
            except RuntimeError as refused:
                raise Wrong(
                    yours=" ".join(str(refused).split())[:200],  # the list of keys can be long
                    expected=expected,
                    hint='Remove, or add, exactly one "module." at the start of each key, and '
                    "only if the model's own keys differ from the state's.",
                ) from refused
            hint = "The state passed in was changed; work on a new dict."
            expect_equal(list(state), list(before), hint=hint)
            for mine, theirs in zip(target.state_dict().values(), before.values(), strict=True):
                hint = "The model's parameters don't match those in the state."
                expect_close(mine, theirs, hint=hint)
            expect_equal(yours, expected, hint="Return what you did, in exactly these words.")
    stranger = nn.Linear(7, 7).to(gpus[0]).state_dict()
    try:
        answer(model("bare", ["body"]), stranger)
    except RuntimeError:
        return {f"{source} into {into}": said for source, into, said in cases}
    raise Wrong(
        yours="no error",
        expected="the RuntimeError from load_state_dict",
        given="the state of an entirely different model",
        hint="strict=False loads nothing and doesn't complain. Leave it out.",
    )
