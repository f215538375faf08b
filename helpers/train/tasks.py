"""What is trained: a model, its samples, its loss, and what is measured on samples held out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from helpers.data import Digits, DigitsCNN
from helpers.text import letters
from vgpu.plan.layout import Layout, check_tp
from vgpu.plan.transformer import LETTERS, Transformer

DTYPES = {"single": torch.float32, "double": torch.float64}


@dataclass(frozen=True)
class Settings:
    """All that the final parameters depend on, up to rounding."""

    model: str = "digits"
    epochs: int = 8
    batch_size: int = 32
    """Samples a step, on all ranks together; each takes an equal part of them."""
    learning_rate: float = 0.07
    """At the first step; it decreases linearly to zero."""
    momentum: float = 0.9
    dropout: float = 0.0
    width: int = 16
    precision: str = "double"
    seed: int = 0


class Task(Protocol):
    """What ``Training`` asks of the thing that it trains."""

    def __init__(self, settings: Settings) -> None: ...

    def check(self, layout: Layout) -> None:
        """ValueError if the model cannot be divided like this."""

    def samples(self, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, with one sample along each first dimension."""

    def model(self) -> nn.Module: ...

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The parts that FSDP2 gathers one after another."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over all samples, a scalar."""

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What is measured on samples held out: their mean, a scalar."""

    def described(self, score: float) -> str: ...


class DigitsTask:
    """A small convolutional network that reads handwritten digits, as in lesson 07."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.dtype = DTYPES[settings.precision]

    def check(self, layout: Layout) -> None:
        if layout.tp > 1:
            raise ValueError(
                "the network for the digits has no plan for sharing tensors; use --model gpt, or "
                "--parallel ddp, fsdp or hsdp"
            )

    def samples(self, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        digits = Digits(train=train)
        return digits.data[:, None].to(self.dtype) / 255, digits.targets

    def model(self) -> DigitsCNN:
        return DigitsCNN(self.settings.width, self.settings.dropout).to(self.dtype)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return [child for child in model.children()]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0, momentum=self.settings.momentum)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).double().mean()

    def described(self, score: float) -> str:
        return f"{score:.2%} of the held-out digits right"


class GPTTask:
    """A small GPT that learns to write English, letter by letter, as in lesson 12."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sizes = replace(LETTERS, width=settings.width, feed_forward=2 * settings.width)
        if settings.width < 1 or settings.width % (2 * LETTERS.heads):
            raise ValueError(
                f"{LETTERS.heads} heads take a width that divides by {2 * LETTERS.heads}; found "
                f"--width {settings.width}"
            )
        if settings.dropout:
            raise ValueError("the GPT has no dropout; leave --dropout out")

    def check(self, layout: Layout) -> None:
        check_tp(self.sizes, layout.tp)

    def samples(self, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, length = letters(train), self.sizes.sequence
        count = (len(tokens) - 1) // length
        inputs, targets = tokens[: count * length], tokens[1 : count * length + 1]
        return inputs.view(count, length), targets.view(count, length)

    def model(self) -> Transformer:
        return Transformer(self.sizes).to(DTYPES[self.settings.precision])

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Transformer)
        return list(model.blocks)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0, betas=(self.settings.momentum, 0.95))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(outputs, targets)

    def described(self, score: float) -> str:
        return f"a loss of {score:.3f} a letter on held-out text"


TASKS: dict[str, Callable[[Settings], Task]] = {"digits": DigitsTask, "gpt": GPTTask}

DEFAULTS = {
    "digits": Settings(),
    "gpt": Settings(
        "gpt", epochs=1, batch_size=32, learning_rate=0.01, width=128, precision="single"
    ),
}
"""What each model is trained with unless something else is asked for."""
