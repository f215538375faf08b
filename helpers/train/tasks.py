"""What is trained: a model, its samples, its loss, and what is measured on samples held out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from helpers.data import Digits
from helpers.models import DigitsCNN, Transformer, TransformerSizes
from helpers.parallel import Layout, check_tensors

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
        if layout.tensors > 1:
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


TASKS: dict[str, Callable[[Settings], Task]] = {"digits": DigitsTask}

DEFAULTS = {"digits": Settings()}
"""What each model is trained with unless something else is asked for."""
