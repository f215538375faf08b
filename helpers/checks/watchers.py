"""What checks watch: models, a run, what goes back to the host, and what leaves a device."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from vgpu.profiling import EagerDispatchMode

FEATURES, CLASSES = 6, 4


class _Token:
    """Lives as long as the autograd node that holds it."""


class _Witness(torch.autograd.Function):
    """The identity; its node holds a token, so that a graph that is kept can be seen."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, tokens: weakref.WeakSet) -> torch.Tensor:
        ctx.token = _Token()
        tokens.add(ctx.token)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Watched(nn.Module):
    """A small classifier that notes, at every forward, its mode and whether a graph is recorded."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES)
        )
        self.modes: list[bool] = []
        self.recorded: list[bool] = []
        self.live_graphs: list[int] = []
        self._tokens: weakref.WeakSet = weakref.WeakSet()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(self._tokens) > 1:
            gc.collect()  # a graph in a reference cycle is not kept, only not yet found
        self.live_graphs.append(len(self._tokens))
        logits = _Witness.apply(self.layers(inputs), self._tokens)
        self.modes.append(self.training)
        self.recorded.append(logits.requires_grad)
        return logits


class WatchedScores(nn.Module):
    """A small network that notes at each call: training mode, and whether a graph is recorded."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 6), nn.Tanh(), nn.Linear(6, classes))
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.layers(images)
        self.seen.append((self.training, scores.requires_grad))
        return scores


class Augmented(Dataset):
    """Items (index, input, label); noise from torch's CPU random state is added to the input."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = torch.randn(FEATURES) / 2
        return index, self.inputs[index] + noise, self.labels[index]


class Trainer:
    """A run that notes which items each batch held, and the loss of each step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.items: list[list[int]] = []
        self.noisy: list[torch.Tensor] = []
        self.losses: list[float] = []

    def train(self, batches: Iterable) -> None:
        for index, inputs, labels in batches:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs), labels)
            loss.backward()
            self.optimizer.step()
            self.items.append(index.tolist())
            self.noisy.append(inputs)
            self.losses.append(loss.item())


class ReadBacks(EagerDispatchMode):
    """Counts what makes the host wait: values that go from ``device_type`` to the CPU."""

    ASKING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in self.ASKING:
            self.count += self._is_ours(args[0])
        elif name == "_to_copy":
            target = kwargs.get("device")
            to_cpu = target is not None and torch.device(target).type == "cpu"
            self.count += self._is_ours(args[0]) and to_cpu
        elif name == "copy_":
            self.count += self._is_ours(args[1]) and not self._is_ours(args[0])
        return func(*args, **kwargs)

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self.device_type


class Leaving(EagerDispatchMode):
    """Counts the numbers of a recorded graph that are copied from each device to another.

    What needs no gradient, such as labels in whatever form, is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[torch.device] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            if source.requires_grad and source.device != result.device:
                self.numbers[source.device] += source.numel()
        return result
