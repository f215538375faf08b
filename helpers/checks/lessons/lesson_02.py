"""Checks of lesson 02: a silent wrong gradient, a meter without a graph, an old script."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from helpers.autograd_graph import SavedTensors
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, for_input
from helpers.checks.watchers import WatchedScores
from vgpu.units import format_bytes

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@exercise("2.1", "Find the silent wrong gradient")
def loss_today(answer: Callable[..., torch.Tensor]) -> dict[str, Any]:
    size, classes, batch = (int(torch.randint(3, 9, ())) for _ in range(3))
    weight = torch.randn(size, classes, dtype=torch.float64) * 0.3
    weight[:, 0] /= 100  # class 0 is weak in every image, so that something is always cut
    weight.requires_grad_()
    images = torch.rand(batch + 4, size, dtype=torch.float64) * 5
    images[0, 0] = -6  # the largest is below 0
    labels = torch.randint(classes, (batch + 4,))
    given = f"weight {tuple(weight.shape)}, images {tuple(images.shape)}, all random"
    right, right_gradient = _value_and_gradient(_right_loss, weight, images, labels)
    _, hidden_gradient = _value_and_gradient(_silent_loss, weight, images, labels)

    before = weight.detach().clone(), images.clone()
    with for_input(given):
        loss = answer(weight, images, labels)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise Wrong(yours=loss, expected="a 0-dim tensor", hint="Return the loss itself.")
        for yours, expected in zip((weight.detach(), images), before, strict=True):
            expect_equal(yours, expected, hint=_EDITED)
        hint = "The value must stay what loss_2017 gives, for images below 0 as well. Only its "
        expect_close(loss.detach(), right, hint=hint + "gradient was wrong.")
        gradient = _gradient_of(loss, weight)
        hint = "The gradient of weight is off."
        if torch.allclose(gradient, hidden_gradient):
            hint = "This is still the gradient of loss_2017: one edit is hidden from autograd."
        expect_close(gradient, right_gradient, hint=hint)
    before_off, off = ((g - right_gradient).abs().max() for g in (hidden_gradient, gradient))
    return {
        "your gradient": f"at most {off:.1g} from the right one",
        "loss_2017's": f"at most {before_off:.1g} from it",
    }


_EDITED = (
    "Your function changed its arguments in place. The caller's tensors must stay as they are."
)


def _gradient_of(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not loss.requires_grad:
        raise Wrong(
            yours="a loss without a graph",
            expected="a loss whose backward() reaches weight",
            hint="Something between weight and the loss was cut off: detach, data or no_grad.",
        )
    try:
        return torch.autograd.grad(loss, weight)[0]
    except RuntimeError as error:
        hint = "backward() does not reach weight."
        if "inplace operation" in str(error):
            hint = (
                "Now autograd sees the edit, but tanh needs the values that were overwritten. "
                "Make a new tensor instead of editing this one."
            )
        raise Wrong(
            yours=f"RuntimeError in backward(): {str(error).partition(': [')[0]}",
            expected="a backward() that reaches weight",
            hint=hint,
        ) from error


def _silent_loss(weight: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(images / images.abs().max() @ weight)
    hidden.data[hidden.data.abs() < 0.1] = 0
    return F.cross_entropy(hidden, labels)


def _right_loss(weight: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(images / images.abs().max() @ weight)
    return F.cross_entropy(torch.where(hidden.abs() < 0.1, 0.0, hidden), labels)


def _value_and_gradient(
    function: Callable[..., torch.Tensor], weight: torch.Tensor, *rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    loss = function(weight, *rest)
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


@exercise("2.2", "A meter for a running mean")
def running_mean(answer: Callable[[], Any]) -> dict[str, Any]:
    weight = torch.randn(50, requires_grad=True)
    counts = (torch.randperm(40)[:4] + 1).tolist()
    given = f"losses of batches of {', '.join(map(str, counts))} samples"
    with for_input(given):
        held = _feed(answer, weight, counts)
        if held:
            raise Wrong(
                yours=f"{format_bytes(held)} that autograd saved are alive after the updates",
                expected="0 B",
                hint="The meter still holds a tensor with history. Take its value: .item() or "
                ".detach().",
            )
    return {"your saved tensors": format_bytes(held), "budget": "0 B"}


def _feed(answer: Callable[[], Any], weight: torch.Tensor, counts: list[int]) -> int:
    """Update a meter with losses, and a second one beside it; the bytes that are kept."""
    meter, other = answer(), answer()
    total = 0.0
    with SavedTensors(ignore=[weight]) as saved:
        for step, count in enumerate(counts):
            loss = (torch.randn(count, 50) * weight).square().mean()
            value = loss.item()
            meter.update(loss, count)
            _expect_untouched(loss, value, weight)
            total += value * count
            _expect_mean(meter.mean(), total / sum(counts[: step + 1]), counts[: step + 1])
            other.update(torch.tensor(float(step)), 1)
            del loss
        gc.collect()
        held = saved.live_bytes()
    given = "a second meter, updated in turn with the first"
    hint = "Two meters share their sums. Make them in __init__, not in the class."
    expect_close(other.mean(), 1.5, given=given, hint=hint)
    return held


def _expect_untouched(loss: torch.Tensor, value: float, weight: torch.Tensor) -> None:
    given = "the value of a loss after update(loss, count)"
    hint = "update() changed the caller's loss in place: detach() shares its memory."
    expect_equal(loss.item(), value, given=given, hint=hint)
    if not loss.requires_grad:
        raise Wrong(
            yours="a loss that lost its graph in update()",
            expected="a loss that backward() can still be called on",
            hint="detach_() and requires_grad_(False) change the caller's tensor; use detach().",
        )
    torch.autograd.grad(loss, weight, retain_graph=True)


def _expect_mean(yours: Any, expected: float, counts: list[int]) -> None:
    given = f"batches of {', '.join(map(str, counts))} samples"
    if type(yours) is not float:
        hint = "mean() gives a Python number, not a tensor: .item() makes one."
        raise Wrong(yours=yours, expected=expected, given=given, hint=hint)
    hint = "Weigh each batch's mean by its count, and divide by all counts so far."
    expect_close(yours, expected, given=given, rtol=1e-4, atol=1e-6, hint=hint)


@exercise("2.3", "Modernise a second old script")
def fit_today(answer: Callable[..., tuple[float, float]]) -> dict[str, Any]:
    size, classes = (int(torch.randint(3, 8, ())) for _ in range(2))
    batches, held_out = _random_batches(size, classes), _random_batches(size, classes)
    model, rate = WatchedScores(size, classes), float(torch.rand(()) + 0.1)
    model.eval()  # so that a forgotten train() is noticed
    reference = WatchedScores(size, classes)
    reference.load_state_dict(model.state_dict())
    expected = _fit_reference(reference, batches, held_out, rate)

    # One batch alone: its loss does not depend on how the step that follows it is made.
    first = _run_and_watch(answer, copy.deepcopy(model), batches[:1], held_out[:1], rate)
    alone = _fit_reference(copy.deepcopy(model), batches[:1], held_out[:1], rate)
    loss_hint = (
        "size_average=False meant a sum over the batch; log_softmax goes over classes, dim 1."
    )
    _expect_loss(first[0], alone[0], "the training loss of one batch", loss_hint)

    returned = _run_and_watch(answer, model, batches, held_out, rate)
    hint = "The weights differ from the old script's: is each of its steps still there?"
    expected_state = reference.state_dict()
    for name, yours in model.state_dict().items():
        expect_close(yours, expected_state[name], given=f"{name} after training", hint=hint)
    _expect_loss(returned[0], expected[0], "the training loss", "It is summed over all batches.")
    _expect_loss(returned[1], expected[1], "the held-out loss", loss_hint)
    return {
        "your losses": f"{returned[0]:.4f} in training, {returned[1]:.4f} held out, as before",
        "warnings, graphs": f"none, on {len(batches)} and {len(held_out)} batches",
        "saved tensors left": "0 B, the budget",
    }


def _expect_loss(yours: float, expected: float, name: str, hint: str) -> None:
    expect_close(yours, expected, given=name, rtol=1e-4, atol=1e-5, hint=hint)


def _run_and_watch(
    answer: Callable[..., Any],
    model: WatchedScores,
    batches: Batches,
    held_out: Batches,
    rate: float,
) -> tuple[float, float]:
    """What the answer returned, after all that does not depend on its numbers has been checked."""
    counts = f"batches: {len(batches)}, held out: {len(held_out)}"
    hint = "Each old word has a successor: the table at the end of the lesson names them."
    with for_input(f"a network, {counts}, rate {rate:.2f}", hint):
        warned, returned, held = _run_quietly(answer, model, batches, held_out, rate)
        if warned:
            hint = "The warning names the old word and what replaces it."
            if "Converting a tensor" in warned[0]:
                hint = "float(loss) warns, since it drops the history without a word: loss.item()."
            raise Wrong(yours=f"a warning: {warned[0]}", expected="no warning", hint=hint)
        _expect_modes(model.seen, len(batches), len(held_out))
        both = isinstance(returned, (tuple, list)) and len(returned) == 2
        if not both or any(type(part) is not float for part in returned):
            raise Wrong(
                yours=returned,
                expected="two Python numbers: the training loss and the held-out loss",
                hint="Return two Python numbers; a loss is a 0-dim tensor, .item() makes a number.",
            )
        if held:
            raise Wrong(
                yours=f"{format_bytes(held)} that autograd saved are still alive",
                expected="0 B",
                hint="Something keeps a loss with its graph.",
            )
    return returned[0], returned[1]


def _random_batches(size: int, classes: int) -> Batches:
    counts = torch.randint(2, 7, (3,)).tolist()
    return [(torch.randn(count, size) * 3, torch.randint(classes, (count,))) for count in counts]


def _fit_reference(
    model: nn.Module, batches: Batches, held_out: Batches, rate: float
) -> tuple[float, float]:
    optimizer = optim.SGD(model.parameters(), lr=rate)
    total = 0.0
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), labels, reduction="sum") for x, labels in held_out]
    return total, sum(loss.item() for loss in losses)


def _run_quietly(
    answer: Callable[..., Any],
    model: WatchedScores,
    batches: Batches,
    held_out: Batches,
    rate: float,
) -> tuple[list[str], Any, int]:
    """The answer's warnings, what it returned, and the saved bytes it left alive."""
    warned_always = torch.is_warn_always_enabled()
    try:
        with warnings.catch_warnings(record=True) as seen, SavedTensors() as saved:
            warnings.simplefilter("always")
            torch.set_warn_always(True)  # C++ gives some warnings once per process
            returned = answer(model, batches, held_out, rate)
            gc.collect()
            held = saved.live_bytes()
        if not torch.is_grad_enabled():
            raise Wrong(
                yours="recording is still off after the call",
                expected="recording is on again",
                hint="set_grad_enabled(False) as a function stays. Use it, or no_grad, with `with`.",
            )
    finally:
        torch.set_warn_always(warned_always)
        torch.set_grad_enabled(True)
    return [str(item.message).splitlines()[0] for item in seen], returned, held


def _expect_modes(seen: list[tuple[bool, bool]], trained: int, held_out: int) -> None:
    if len(seen) != trained + held_out:
        raise Wrong(
            yours=f"{len(seen)} calls of the model",
            expected=f"{trained + held_out}, one a batch",
            hint="Go once over the batches, then once over the held-out ones.",
        )
    if not all(training for training, _ in seen[:trained]):
        raise Wrong(
            yours="the model was not in training mode for the batches",
            expected="model.train()",
            hint="The check hands the model over in eval(): switch it, as the old script does.",
        )
    if not all(recorded for _, recorded in seen[:trained]):
        raise Wrong(
            yours="no graph was recorded for the batches",
            expected="a graph for backward() to go through",
            hint="Leave the training loop outside no_grad.",
        )
    if any(recorded for _, recorded in seen[trained:]):
        raise Wrong(
            yours="a graph was recorded for the held-out batches",
            expected="no graph",
            hint="volatile=True asked for none. Today: with torch.no_grad():",
        )
    if any(training for training, _ in seen[trained:]):
        raise Wrong(
            yours="the model was in training mode for the held-out batches",
            expected="model.eval()",
            hint="no_grad does not replace model.eval().",
        )
