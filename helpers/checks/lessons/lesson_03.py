"""Checks for lesson 03: evaluation, one read-back per epoch, checkpoints, and mid-epoch resume."""

import copy
import inspect
import io
import math
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers import devices
from helpers.checks.core import (
    Wrong,
    exercise,
    expect_close,
    expect_equal,
    expect_two,
    for_input,
)
from helpers.checks.describing import describe
from helpers.checks.watchers import CLASSES, FEATURES, Augmented, ReadBacks, Trainer, Watched


def _items(short: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return random inputs, labels and a batch size; with ``short``, the last batch is shorter."""
    batch_size = random.randint(5, 9)
    count = batch_size * random.randint(4, 6) + (random.randint(1, 2) if short else 0)
    return torch.randn(count, FEATURES), torch.randint(CLASSES, (count,)), batch_size


def _float_or_wrong(value: Any, name: str) -> float:
    if isinstance(value, float):
        return value
    raise Wrong(
        yours=value,
        expected=f"{name} as a Python float",
        hint=".item() turns a tensor with one element into a Python number."
        if isinstance(value, torch.Tensor)
        else "Divide the sum by the number of images: that gives a float.",
    )


@exercise("3.1", "An evaluation with three bugs")
def check_evaluate(evaluate: Callable) -> dict[str, Any]:
    # Try a full and a short last batch, and a model on the CPU and on a GPU, in both modes.
    for device in (torch.device("cpu"), devices.lab(1)[0]):
        for training, short in ((True, False), (False, True), (True, True)):
            loss, share = _check_one_evaluation(evaluate, device, training, short)
    return {
        "your result": f"loss {loss:.4f}, {share:.1%} right, as in a single pass over all images",
        "tried on": f"cpu and {device}, a full and a short last batch, both modes",
    }


def _check_one_evaluation(
    evaluate: Callable, device: torch.device, training: bool, short: bool
) -> tuple[float, float]:
    inputs, labels, batch_size = _items(short)
    model = Watched(dropout=0.5).to(device).eval()
    with torch.no_grad():
        logits = model(inputs.to(device)).cpu()
    expected = (
        F.cross_entropy(logits, labels).item(),
        (logits.argmax(1) == labels).float().mean().item(),
    )
    model.train(training)
    model.modes.clear()
    model.recorded.clear()
    mode = "train" if training else "eval"
    given = f"{len(inputs)} images in batches of {batch_size}, a model in {mode} mode on {device}"
    with for_input(given):
        loader = DataLoader(TensorDataset(inputs, labels), batch_size)
        _check_answer(evaluate(model, loader, device), model, expected)
    if model.training != training:
        raise Wrong(
            yours=f"{'train' if model.training else 'eval'} mode",
            expected=f"{mode} mode",
            given=f"the model's mode after the call; {given}",
            hint="Save model.training before model.eval(), and restore it at the end.",
        )
    return expected


def _check_answer(answer: Any, model: Watched, expected: tuple[float, float]) -> None:
    hint = "Return two numbers: loss_sum / count, right / count."
    expect_two(answer, "(mean loss, fraction correct)", hint)
    if any(model.modes):
        raise Wrong(
            yours=f"{sum(model.modes)} of {len(model.modes)} batches in train mode",
            expected="every batch in eval mode",
            hint="Dropout is still on while you evaluate: call model.eval() first.",
        )
    if any(model.recorded):
        raise Wrong(
            yours="a graph was recorded for backward",
            expected="no graph",
            hint="Nothing calls backward here: torch.no_grad() saves the activations' memory.",
        )
    if any(not parameter.requires_grad for parameter in model.parameters()):
        raise Wrong(
            yours="parameters that no longer require gradients",
            expected="an unchanged model",
            hint="torch.no_grad() records nothing and leaves the parameters as they are.",
        )
    loss, share = (
        _float_or_wrong(value, name)
        for value, name in zip(answer, ("the mean loss", "the fraction correct"), strict=True)
    )
    hint = (
        "Each image counts once. A mean of batch means gives the images of a short last batch too "
        "much weight: sum over images, then divide once by their number."
    )
    if math.isclose(loss, expected[1], rel_tol=1e-5) and not math.isclose(loss, share):
        hint = "You return the fraction first: return the mean loss, then the fraction."
    expect_close(loss, expected[0], hint=f"The loss is wrong. {hint}", rtol=1e-4, atol=1e-5)
    expect_close(share, expected[1], hint=f"The fraction is wrong. {hint}", rtol=1e-5, atol=1e-6)


@exercise("3.2", "One read-back per epoch")
def check_train_epoch_quietly(train_epoch: Callable) -> dict[str, Any]:
    device = devices.lab(1)[0]
    for short in (True, False):
        inputs, labels, batch_size = _items(short)
        loader = DataLoader(TensorDataset(inputs, labels), batch_size)
        model, plain = Watched(dropout=0.0).to(device), Watched(dropout=0.0).to(device)
        plain.load_state_dict(model.state_dict())
        expected = _plain_epoch(plain, loader, device)
        given = f"{len(inputs)} images in {len(loader)} batches on {device}"
        model.eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with for_input(given):
            with ReadBacks(device.type) as asked:
                answer = train_epoch(model, loader, optimizer, device)
            _check_quiet(model, plain, given)
            if asked.count > 1:
                raise Wrong(
                    yours=f"{asked.count} values read back",
                    expected="1 value read back",
                    hint=".item(), float(), .cpu() and .tolist() each make the host wait. Sum on "
                    "the device, and read the value after the loop.",
                )
            hint = (
                "Each image counts once: weight a batch's mean loss by len(labels), and divide the "
                "sum by the number of images."
            )
            loss = _float_or_wrong(answer, "the mean loss")
            expect_close(loss, expected, hint=hint, rtol=1e-4, atol=1e-5)
    return {
        "your read-backs": f"{asked.count} in an epoch of {len(loader)} batches",
        "budget": "1",
        "the loop above": f"{len(loader)}, one per step",
    }


def _plain_epoch(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Train for an epoch as the lesson does, with plain SGD; return the mean loss per image."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_sum, count = 0.0, 0
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        count += len(labels)
    return loss_sum / count


def _check_quiet(model: Watched, plain: Watched, given: str) -> None:
    """Raise Wrong unless the model ran in train mode, kept no graphs, and ended like ``plain``."""
    if not model.modes or not all(model.modes):
        raise Wrong(
            yours=f"{sum(model.modes)} batches in train mode",
            expected=f"all {len(plain.modes)} batches in train mode",
            hint="Call model.train() first.",
        )
    # During a step's forward, the variable `loss` may still hold the previous step's graph.
    if max(model.live_graphs) > 1:
        raise Wrong(
            yours=f"{max(model.live_graphs)} graphs from earlier steps alive at once",
            expected="at most 1",
            hint="What you add up still holds its graph: loss.detach() holds only the value.",
        )
    hint = (
        "The lesson's loop ends with different weights: call zero_grad, backward, and step for each "
        "batch."
    )
    mine = model.state_dict()
    for name, value in plain.state_dict().items():
        expect_close(mine[name], value, given=f"{name} after the epoch; {given}", hint=hint)


_PARTS = {
    "model": "Without its weights, the run starts over: run.model.state_dict().",
    "optimizer": "AdamW's moments start at zero: run.optimizer.state_dict().",
    "scheduler": "The learning-rate schedule starts over: run.scheduler.state_dict().",
    "order": "The next epoch's batches come in a different order: run.loader.generator.get_state().",
    "cpu_random": "The CPU's random numbers differ after the stop: torch.get_rng_state().",
    "gpu_random": "Dropout drops different activations: gpu_api.get_rng_state(device).",
    "losses": "The losses from before the stop are lost: run.losses.",
    "epochs_done": "The resumed run doesn't know how many epochs are left: run.epochs_done.",
}
_PLAIN = (torch.Tensor, dict, list, tuple, int, float, str)


@exercise("3.3", "What a checkpoint must hold")
def check_state(state: Callable) -> dict[str, Any]:
    device = devices.lab(1)[0]
    gpu_api = torch.get_device_module(device)
    with torch.random.fork_rng([device.index], device_type=device.type):
        run = _SmallRun(device)
        run.train(random.randint(2, 3))
        expected = _saved_and_loaded(
            {
                "model": run.model.state_dict(),
                "optimizer": run.optimizer.state_dict(),
                "scheduler": run.scheduler.state_dict(),
                "order": run.loader.generator.get_state(),
                "cpu_random": torch.get_rng_state(),
                "gpu_random": gpu_api.get_rng_state(device),
                "losses": run.losses,
                "epochs_done": run.epochs_done,
            }
        )
        with for_input(f"a run after {run.epochs_done} epochs"):
            saved = _saved_and_loaded(state(run))
            for name, part in expected.items():
                if not _same(saved[name], part):
                    raise Wrong(
                        yours=f"{name}: {describe(saved[name])}, not the run's state",
                        expected=f"{name}: {describe(part)}",
                        hint=_PARTS[name],
                    )
    return {"your checkpoint": f"{len(saved)} parts; after loading, each matches the run's state"}


def _same(yours: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(yours, dict)
            and yours.keys() == expected.keys()
            and all(_same(yours[key], value) for key, value in expected.items())
        )
    if isinstance(expected, torch.Tensor):
        return isinstance(yours, torch.Tensor) and torch.equal(yours, expected)
    return bool(type(yours) is type(expected) and yours == expected)


class _SmallRun:
    """A small version of the lesson's run: four inputs, dropout, and six batches per epoch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        data = TensorDataset(torch.linspace(-1, 1, 96).reshape(24, 4), torch.arange(24) % 2)
        order = torch.Generator().manual_seed(random.randrange(2**31))
        self.loader = DataLoader(data, 4, shuffle=True, generator=order)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.01, total_steps=60)
        self.losses: list[float] = []
        self.epochs_done = 0

    def train(self, epochs: int) -> None:
        for inputs, labels in (batch for _ in range(epochs) for batch in self.loader):
            noisy = (inputs + 0.1 * torch.randn(inputs.shape)).to(self.device)
            loss = F.cross_entropy(self.model(noisy), labels.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
        self.epochs_done += epochs


def _saved_and_loaded(answer: Any) -> dict[str, Any]:
    """Save and load the answer as the lesson does; raise Wrong if a part is missing or rejected."""
    if not isinstance(answer, dict):
        raise Wrong(yours=answer, expected="a dictionary", hint="Return one entry per part.")
    missing = [name for name in _PARTS if name not in answer]
    if missing:
        raise Wrong(
            yours=f"{len(answer)} parts, without {', '.join(missing)}",
            expected=f"the parts {', '.join(_PARTS)}",
            hint=_PARTS[missing[0]],
        )
    file = io.BytesIO()
    torch.save(answer, file)
    file.seek(0)
    try:
        loaded: dict[str, Any] = torch.load(file, map_location="cpu")
    except pickle.UnpicklingError:
        whole = [name for name, part in answer.items() if not isinstance(part, _PLAIN)]
        raise Wrong(
            yours=f"{', '.join(whole) or 'a part'} as an object",
            expected="tensors, numbers and containers, which torch.load allows",
            hint="Save what .state_dict() or .get_state() returns, not the object itself.",
        ) from None
    return loaded


@exercise("3.4", "Stop in the middle of an epoch")
def check_remaining_batches(remaining_batches: Callable) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        # Use enough items that a different shuffle can't leave the same items for the rest.
        total = random.randint(5, 7)
        # Stop in the middle, before the first batch, and after the last.
        for done in (random.randint(2, total - 2), 0, total):
            _check_one_resume(remaining_batches, total, done)
    return {
        "your losses": "match the uninterrupted run's losses, bit for bit, through the next epoch",
        "stopped": "in the middle, before the first batch, and after the last",
    }


def _check_one_resume(remaining_batches: Callable, total: int, done: int) -> None:
    batch_size = random.randint(4, 6)
    count = total * batch_size - random.randint(0, 2)
    data = Augmented(torch.randn(count, FEATURES), torch.randint(CLASSES, (count,)))

    def new_loader() -> DataLoader:
        order = torch.Generator().manual_seed(random.randrange(2**31))
        return DataLoader(data, batch_size, shuffle=True, generator=order)

    whole, loader = Trainer(), new_loader()
    order = loader.generator.get_state()
    batches = iter(loader)
    whole.train(islice(batches, done))
    weights = copy.deepcopy(whole.model.state_dict())
    momentum = copy.deepcopy(whole.optimizer.state_dict())
    random_state = torch.get_rng_state()
    whole.train(batches)
    ends = len(whole.losses)
    whole.train(loader)

    part, loader = Trainer(), new_loader()
    part.model.load_state_dict(weights)
    part.optimizer.load_state_dict(momentum)
    torch.set_rng_state(random_state)
    given = f"an epoch of {total} batches, stopped after {done}"
    with for_input(given):
        answer = remaining_batches(loader, order.clone(), done)
        _expect_iterable(answer)
        part.train(answer)
    _compare_epoch(part, whole, done, ends, given)
    part.train(loader)
    hint = (
        "The loader's generator must end in the same state as in the uninterrupted run: iterate over "
        "this loader once, and over nothing else that draws from its generator."
    )
    after = f"the items of the next epoch; {given}"
    expect_equal(part.items[ends - done :], whole.items[ends:], given=after, hint=hint)
    _expect_same_losses(
        part.losses, whole.losses[done:], f"the losses up to the end; {given}", done
    )


def _expect_iterable(answer: Any) -> None:
    if isinstance(answer, list | tuple):
        raise Wrong(
            yours=f"a {type(answer).__name__} of {len(answer)} batches",
            expected="batches one at a time",
            hint="A list loads every batch before the first step, so augmentation and dropout draw "
            "their random numbers in a different order. Use yield, or yield from.",
        )
    if not inspect.isgenerator(answer) and not isinstance(answer, Iterator):
        hint = "Use yield in the function: calling it then returns a generator."
        raise Wrong(yours=answer, expected="a generator of batches", hint=hint)


def _compare_epoch(part: Trainer, whole: Trainer, done: int, ends: int, given: str) -> None:
    expected = whole.items[done:ends]
    if part.items != expected:
        epoch = {item for batch in part.items for item in batch}
        left = {item for batch in expected for item in batch}
        if len(part.items) != len(expected):
            hint = "Skip exactly the batches that are already done, no more and no fewer."
        elif epoch != left:
            hint = (
                "This is a different shuffle: some items appear twice in the epoch, others never. "
                "Set loader.generator back to `order` before you iterate."
            )
        else:
            hint = (
                "These are the right items, but in a different order. Set loader.generator back to "
                "`order` before you iterate."
            )
        given = f"the items in the batches; {given}"
        raise Wrong(yours=part.items, expected=expected, given=given, hint=hint)
    hint = (
        "These are the right items, but with different noise. Skipping batches drew from torch's CPU "
        "random state: save it before, restore it after, and load each batch only when it's needed."
    )
    for mine, theirs in zip(part.noisy, whole.noisy[done:ends], strict=True):
        expect_equal(mine, theirs, given=f"the augmented images; {given}", hint=hint)
    _expect_same_losses(part.losses, whole.losses[done:ends], f"the losses; {given}", done)


def _expect_same_losses(mine: list, theirs: list, given: str, done: int) -> None:
    for step, (yours, expected) in enumerate(zip(mine, theirs, strict=True), start=done):
        hint = f"Step {step} is the first that differs: was a random number drawn in between?"
        expect_equal(yours, expected, given=given, hint=hint)
