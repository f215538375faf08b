"""Checks for lesson 01: nested batches, a script with device bugs, and visible devices."""

import os
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from helpers import devices
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, for_input
from helpers.checks.describing import describe
from vgpu.profiling import OperatorLog

Sample = namedtuple("Sample", "image label")


class Clip:
    """Not a tensor, although it has a ``to`` method."""

    def to(self, _: Any) -> "Clip":
        return Clip()

    def __repr__(self) -> str:
        return "<clip with a to() method>"


@exercise("1.1", "Move a batch to a device")
def check_to_device(to_device: Callable[[Any, torch.device], Any]) -> dict[str, Any]:
    near, far = devices.lab(2)
    copied = asked = 0
    for batch in _batches(near, far):
        untouched = _shape_of(batch)
        crossing = sum(tensor.device != far for tensor in _tensors(batch))
        given = f"to_device({_sketch(batch)}, {far})"
        hint = _TENSOR if isinstance(batch, torch.Tensor) else _CONTAINERS
        with for_input(given, hint), OperatorLog() as calls:
            moved = to_device(batch, far)
        with for_input(given):
            if _shape_of(batch) != untouched:
                raise Wrong(
                    yours="the batch that was passed in has changed",
                    expected="the batch unchanged, and a new one returned",
                    hint="Build new containers; don't write into the old ones.",
                )
            _compare(moved, batch, far, "batch")
            if calls.copies != crossing:
                raise Wrong(
                    yours=f"{calls.copies} copies",
                    expected=f"{crossing} copies",
                    hint="Each tensor that has to move needs one copy, which .to(device) makes.",
                )
        copied, asked = copied + calls.copies, asked + crossing
    return {
        "your copies": copied,
        "budget": f"{asked} copies, one for each tensor that had to move",
    }


_TENSOR = "Move a tensor to the device that was passed to your function: tensor.to(device)."
_CONTAINERS = (
    "First check what the batch is: a tensor, a dict, a namedtuple, a list, a tuple, or "
    "something else, which you return unchanged."
)


def _batches(near: torch.device, far: torch.device) -> Iterator[Any]:
    """Yield batches from simple to unusual, with random values; some tensors are on ``far``."""

    def tensor(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        shape = (random.randint(2, 5), random.randint(2, 5))
        return torch.randint(0, 9, shape).to(dtype).to(device)

    yield tensor()
    yield tensor(far)
    yield [tensor(), tensor(near, torch.int64)]
    yield tensor(), tensor(far)
    yield {"image": tensor(), "label": tensor(far, torch.int64)}
    yield {"image": tensor(near), "name": "seven", "index": random.randint(0, 99), "mask": None}
    yield Sample(tensor(), tensor(dtype=torch.bool))
    yield {"image": tensor(), "clip": Clip()}
    yield [{"pair": (tensor(), [tensor(far), 0.5])}, [], Sample(tensor(near), ("a", tensor()))]


def _compare(yours: Any, given: Any, device: torch.device, place: str) -> None:
    """Raise Wrong unless ``yours`` is ``given`` with its tensors on ``device``."""
    if isinstance(given, torch.Tensor):
        _compare_tensor(yours, given, device, place)
    elif isinstance(given, (list, tuple, dict)):
        if yours is given and any(tensor.device != device for tensor in _tensors(given)):
            raise Wrong(
                yours=f"{place}: the {type(given).__name__} that was passed in, unchanged",
                expected=f"a new {type(given).__name__}, with its tensors on {device}",
                hint=f"A {type(given).__name__} has no .to(): go through its entries.",
            )
        if type(yours) is not type(given):
            raise Wrong(
                yours=f"{place} is a {type(yours).__name__}",
                expected=f"a {type(given).__name__}",
                hint=_container_hint(given),
            )
        keyed = isinstance(given, dict)
        keys = list(given) if keyed else range(len(given))
        if (list(yours) if keyed else range(len(yours))) != keys:
            raise Wrong(
                yours=f"{place} has {f'the keys {list(yours)}' if keyed else f'length {len(yours)}'}",
                expected=f"the keys {keys}" if keyed else f"length {len(given)}",
                hint="Every entry belongs in the result, in the same order.",
            )
        for key in keys:
            _compare(yours[key], given[key], device, f"{place}[{key!r}]")
    elif yours is not given:
        raise Wrong(
            yours=f"{place}: {describe(yours)}",
            expected=f"{place}: {describe(given)}, the same object",
            hint="If something is neither a tensor nor a container, return it unchanged.",
        )


def _compare_tensor(yours: Any, given: torch.Tensor, device: torch.device, place: str) -> None:
    if not isinstance(yours, torch.Tensor) or yours.device != device:
        where = yours.device if isinstance(yours, torch.Tensor) else type(yours).__name__
        raise Wrong(
            yours=f"{place}: {where}",
            expected=f"{place}: a tensor on {device}",
            hint=".to() returns the moved tensor; keep what it returns."
            if yours is given
            else "Every tensor goes to the device that was passed to your function.",
        )
    if given.device == device and yours is not given:
        raise Wrong(
            yours=f"{place}: a copy",
            expected=f"{place}: the same tensor, which is already on {device}",
            hint="If a tensor is already on the device, .to(device) returns that tensor.",
        )
    hint = f"The values of {place} have changed along the way; move them, but do nothing else."
    expect_close(yours.cpu(), given.cpu(), hint=hint, rtol=0, atol=0)


def _container_hint(given: Any) -> str:
    if hasattr(given, "_fields"):
        return "A namedtuple takes its fields as separate arguments: type(batch)(*moved)."
    return "Keep the type of each container: a list stays a list, a tuple a tuple, a dict a dict."


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, dict)):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def _shape_of(batch: Any) -> Any:
    """Return the ids of all objects in a batch, to detect whether the batch was modified."""
    if isinstance(batch, (list, tuple)):
        return [id(batch), *map(_shape_of, batch)]
    if isinstance(batch, dict):
        return [id(batch), *((key, _shape_of(part)) for key, part in batch.items())]
    return id(batch)


def _sketch(batch: Any) -> str:
    """Return a batch as one short line that shows only the device of each tensor."""
    if isinstance(batch, torch.Tensor):
        return f"<{batch.device}>"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{k!r}: {_sketch(v)}" for k, v in batch.items()) + "}"
    if hasattr(batch, "_fields"):
        return f"{type(batch).__name__}({', '.join(map(_sketch, batch))})"
    if isinstance(batch, (list, tuple)):
        inside = ", ".join(map(_sketch, batch))
        return f"[{inside}]" if isinstance(batch, list) else f"({inside})"
    return repr(batch)


@exercise("1.2", "A script with four device bugs", callable_answer=False)
def check_repaired(answer: Any) -> dict[str, Any]:
    net_type, run = _two_callables(answer)
    near, far = devices.lab(2)
    losses = {}
    for device in (far, near, torch.device("cpu")):
        torch.manual_seed(random.randrange(2**31))
        model = net_type()
        images, labels = torch.rand(random.randint(4, 9), 4), torch.tensor([0, 1, 2, 1])
        labels = labels.repeat(3)[: len(images)]
        expected = _reference_loss(model, images, labels)
        seen: list[torch.device] = []
        model.linear.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.device))
        given = f"device = {device}, {len(images)} images on the CPU"
        with for_input(given):
            loss = run(model, images, labels, device)
            _expect_model_on(model, device)
            where = f"{given}; the device of each call to the linear layer"
            hint = "The model runs once, on the requested device."
            expect_equal(seen, [device], given=where, hint=hint)
            if not isinstance(loss, (np.ndarray, np.floating)):
                raise Wrong(
                    yours=f"a {type(loss).__name__}",
                    expected="the loss as a NumPy array, as in the script",
                    hint="Keep the script's last step; .numpy() needs a tensor on the CPU.",
                )
            hint = "Keep the class weights and the centering by `mean` as in the script."
            expect_close(torch.as_tensor(loss), expected, hint=hint, rtol=1e-4, atol=1e-5)
        losses[device] = f"{float(loss):.4f} on {device}, within {abs(loss - expected.item()):.1g}"
    return {"your losses": "\n".join(losses.values()), "tried on": f"{len(losses)} devices"}


def _two_callables(answer: Any) -> tuple[Any, Any]:
    if not (isinstance(answer, tuple) and len(answer) == 2 and all(map(callable, answer))):
        raise Wrong(
            yours=answer,
            expected="the pair (Net, run), a class and a function",
            given='check("1.2", (Net, run))',
            hint="Pass both names.",
        )
    return answer


def _reference_loss(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss from exercise 1.2's script, computed on the CPU from the model's weights."""
    weight, bias = model.linear.weight.detach(), model.linear.bias.detach()
    logits = F.linear(images - 0.5, weight, bias)
    return F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 1.0]))


def _expect_model_on(model: nn.Module, device: torch.device) -> None:
    buffers, parameters = dict(model.named_buffers()), dict(model.named_parameters())
    kind = ""
    if "mean" in parameters and parameters["mean"].requires_grad:
        kind = "a parameter, which an optimizer trains"
    elif "mean" not in buffers | parameters:
        kind = "a plain attribute" if hasattr(model, "mean") else "gone from the model"
    if kind:
        raise Wrong(
            yours=f"mean is {kind}",
            expected="mean is a buffer in the model",
            hint="self.register_buffer('mean', tensor): module.to() moves parameters and buffers, "
            "and no optimizer trains a buffer.",
        )
    places = {name: str(t.device) for name, t in {**parameters, **buffers}.items()}
    hint = "The entire model must be on the device: move the model, not its pieces."
    expect_equal(places, dict.fromkeys(places, str(device)), hint=hint)


@exercise("1.3", "The card behind an ordinal")
def check_physical(physical: Callable[[str | None, int, int], int | None]) -> dict[str, Any]:
    asked = 0
    for _ in range(6):
        for visible, cards, hint in _settings():
            expected = _as_torch_counts(visible, cards)
            for ordinal in range(max(len(expected), 1) + 1):
                given = f"CUDA_VISIBLE_DEVICES {_spell(visible)}, ordinal {ordinal}, {cards} cards"
                right = expected[ordinal] if ordinal < len(expected) else None
                with for_input(given, hint):
                    expect_equal(physical(visible, ordinal, cards), right)
                asked += 1
    return {
        "your answers": f"{asked} of {asked} match PyTorch's reading of the variable",
        "among them": "lists in any order, an empty variable, and an unset one",
    }


def _settings() -> Iterator[tuple[str | None, int, str]]:
    """Yield random values of the variable, each with a number of cards and a hint."""
    cards = random.randint(3, 12)
    order = random.sample(range(cards), random.randint(2, cards - 1))

    hint = "The ordinal is a position in the list, counted from 0; past its end, return None."
    yield ",".join(map(str, order)), cards, hint
    yield None, cards, "None means that the variable isn't set: every card is visible, in order."
    yield "", cards, "A variable that's set but empty hides every card."


def _spell(visible: str | None) -> str:
    return "unset" if visible is None else f'= "{visible}"'


def _as_torch_counts(visible: str | None, cards: int) -> list[int]:
    """Return the physical card behind each ordinal, as PyTorch itself reads the variable."""
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")
    }
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("torch.cuda._raw_device_count_nvml", return_value=cards),
    ):
        count = torch.cuda._device_count_nvml()
        return [torch.cuda._get_nvml_device_index(ordinal) for ordinal in range(count)]
