"""Checks for lesson 02: a silently wrong gradient, a graph-free meter, and training only a head."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from helpers.autograd_graph import SavedTensors
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, expect_graph, for_input
from helpers.checks.watchers import Watched
from vgpu.units import format_bytes

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@exercise("2.1", "Find the silently wrong gradient")
def loss_today(answer: Callable[..., torch.Tensor]) -> dict[str, Any]:
    size, classes, batch = (int(torch.randint(3, 9, ())) for _ in range(3))
    weight = torch.randn(size, classes, dtype=torch.float64) * 0.3
    weight[:, 0] /= 100  # class 0 is weak in every image, so some values are always clipped
    weight.requires_grad_()
    images = torch.rand(batch + 4, size, dtype=torch.float64) * 5
    images[0, 0] = -6  # the value with the largest magnitude is negative
    labels = torch.randint(classes, (batch + 4,))
    given = f"weight {tuple(weight.shape)}, images {tuple(images.shape)}, all random"
    right, right_gradient = _value_and_gradient(_right_loss, weight, images, labels)
    _, hidden_gradient = _value_and_gradient(_silent_loss, weight, images, labels)
    _, copied_gradient = _value_and_gradient(_copied_loss, weight, images, labels)

    before = weight.detach().clone(), images.clone()
    with for_input(given):
        loss = answer(weight, images, labels)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise Wrong(yours=loss, expected="a 0-dim tensor", hint="Return the loss itself.")
        for yours, expected in zip((weight.detach(), images), before, strict=True):
            expect_equal(yours, expected, hint=_EDITED)
        hint = "Return the same value as loss_2017, even for negative pixel values: only the "
        expect_close(loss.detach(), right, hint=hint + "gradient of loss_2017 was wrong.")
        gradient = _gradient_of(loss, weight)
        hint = "The gradient of weight is wrong."
        if torch.allclose(gradient, hidden_gradient):
            hint = "This is still the gradient of loss_2017: one edit is hidden from autograd."
        elif torch.allclose(gradient, copied_gradient):
            hint += " Replaced values must not pass a gradient on, but the edit is hidden from autograd."
        expect_close(gradient, right_gradient, hint=hint)
    before_off, off = ((g - right_gradient).abs().max() for g in (hidden_gradient, gradient))
    return {
        "your gradient": f"off by at most {off:.1g}",
        "loss_2017's gradient": f"off by at most {before_off:.1g}",
    }


_EDITED = "Your function changed its arguments in place. The caller's tensors must stay unchanged."


def _gradient_of(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hint = "Something between weight and the loss cuts the graph: detach, data or no_grad."
    expect_graph(loss, "a loss", hint)
    try:
        return torch.autograd.grad(loss, weight)[0]
    except RuntimeError as error:
        hint = "backward() doesn't reach weight."
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


def _copied_loss(weight: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(images / images.abs().max() @ weight).clone()
    hidden.data[hidden.data.abs() < 0.1] = 0  # edits the copy: tanh keeps its own result
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
                yours=f"{format_bytes(held)} saved by autograd, still alive after the updates",
                expected="0 B",
                hint="The meter still holds a tensor with history. Take its value: .item() or "
                ".detach().",
            )
    return {"your saved tensors": format_bytes(held), "budget": "0 B"}


def _feed(answer: Callable[[], Any], weight: torch.Tensor, counts: list[int]) -> int:
    """Update two meters alternately; return how many bytes of saved tensors the first one keeps."""
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
    given = "a second meter, updated alternately with the first"
    hint = "Two meters share their sums. Create the sums in __init__, not in the class body."
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
        hint = "mean() must return a Python float, not a tensor: use .item()."
        raise Wrong(yours=yours, expected=expected, given=given, hint=hint)
    hint = "Weight each batch's mean by its count, and divide by the sum of all counts so far."
    expect_close(yours, expected, given=given, rtol=1e-4, atol=1e-6, hint=hint)


@exercise("2.3", "Train the head alone")
def head_loss(answer: Callable[..., torch.Tensor]) -> dict[str, Any]:
    size, width, classes, batch = (int(torch.randint(3, 9, ())) for _ in range(4))
    backbone, head = Watched(0.0, size, width), nn.Linear(width, classes)
    images, labels = torch.randn(batch, size), torch.randint(classes, (batch,))
    expected = F.cross_entropy(head(backbone(images).detach()), labels)
    right = torch.autograd.grad(expected, head.weight)[0]
    backbone.recorded.clear()

    hint = "Backward needs the head's input, and inference tensors can't be saved for backward."
    with for_input(f"{batch} images of {size} pixels, {width} features, {classes} classes", hint):
        loss = _with_recording_restored(answer, backbone, head, images, labels)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise Wrong(yours=loss, expected="a 0-dim tensor", hint="Return the loss itself.")
        _expect_backbone_untouched(backbone)
        hint = "Return the cross-entropy of head(backbone(images))."
        expect_close(loss.detach(), expected.detach(), hint=hint)
        hint = "Call the head outside the block in which nothing is recorded."
        expect_graph(loss, "a loss", hint)
        loss.backward()
        expect_close(head.weight.grad, right, hint="The gradient of the head's weight is wrong.")
    return {"your graph": "only in the head", "graphs in the backbone": "0, as required"}


def _with_recording_restored(answer: Callable[..., Any], *given: Any) -> Any:
    try:
        returned = answer(*given)
        if not torch.is_grad_enabled():
            raise Wrong(
                yours="recording is still off after the call",
                expected="recording is on again",
                hint="set_grad_enabled(False), called as a function, stays in effect. Use it, or "
                "no_grad, in a `with` statement.",
            )
    finally:
        torch.set_grad_enabled(True)
    return returned


def _expect_backbone_untouched(backbone: Watched) -> None:
    if len(backbone.recorded) != 1:
        raise Wrong(
            yours=f"{len(backbone.recorded)} calls to the backbone",
            expected="1",
            hint="Call the backbone once.",
        )
    if not all(parameter.requires_grad for parameter in backbone.parameters()):
        raise Wrong(
            yours="backbone parameters that no longer require gradients",
            expected="parameters as before the call",
            hint="requires_grad_(False) changes the caller's network for good.",
        )
    if backbone.recorded[0]:
        raise Wrong(
            yours="a graph was recorded in the backbone",
            expected="no graph",
            hint="Detaching the result comes too late. In which block is nothing recorded?",
        )
