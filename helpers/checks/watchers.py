"""Instrumented models, runs and dispatch modes that record what an answer does, for checks."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from helpers.checks.core import Wrong
from vgpu.profiling import EagerDispatchMode

FEATURES, CLASSES = 6, 4


class _Token:
    """An object that lives as long as its autograd node, or what a forward saved for backward."""


class _Witness(torch.autograd.Function):
    """The identity function; its node has a token that shows whether the graph is still alive."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, tokens: weakref.WeakSet) -> torch.Tensor:
        ctx.token = _Token()
        tokens.add(ctx.token)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Watched(nn.Module):
    """A small classifier that records its mode and its graphs on every forward.

    Each forward appends the training mode to ``modes``, whether the result has a graph to
    ``recorded``, and the number of earlier graphs still alive to ``live_graphs``.
    """

    def __init__(self, dropout: float, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, classes)
        )
        self.modes: list[bool] = []
        self.recorded: list[bool] = []
        self.live_graphs: list[int] = []
        self._tokens: weakref.WeakSet = weakref.WeakSet()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(self._tokens) > 1:
            gc.collect()  # a graph in a reference cycle isn't kept, just not collected yet
        self.live_graphs.append(len(self._tokens))
        logits = _Witness.apply(self.layers(inputs), self._tokens)
        self.modes.append(self.training)
        self.recorded.append(logits.requires_grad)
        return logits


class WatchedLinear(nn.Linear):
    """A linear layer that records the number of samples, and of live graphs, on every forward.

    ``graphs_held`` counts earlier forwards that have had no backward yet, or one with
    ``retain_graph=True``. A loss that's kept after its backward keeps no saved tensors alive.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.samples: list[int] = []
        self.graphs_held: list[int] = []
        self._saved: weakref.WeakSet[_Token] = weakref.WeakSet()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._saved:
            gc.collect()  # a graph in a reference cycle isn't kept, just not collected yet
        self.samples.append(len(input))
        self.graphs_held.append(len(self._saved))
        saved = _Token()
        self._saved.add(saved)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor, saved), lambda packed: packed[0]
        ):
            return super().forward(input)


def count_sent(parallel: DistributedDataParallel) -> list[int]:
    """Return a list to which the bytes of each bucket are appended when DDP sends it."""
    sent_bytes: list[int] = []
    world = dist.group.WORLD
    assert world is not None

    def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent_bytes.append(bucket.buffer().nbytes)
        return allreduce_hook(world, bucket)

    parallel.register_comm_hook(None, send)
    return sent_bytes


def expect_one_micro_batch(largest: int, most: int, graphs_held: int) -> None:
    """Raise Wrong if a forward had more than a micro-batch's samples, or graphs were kept alive."""
    if largest > most:
        raise Wrong(
            yours=f"a forward on {largest} samples at once",
            expected=f"at most {most}, one micro-batch",
            hint="Merged micro-batches need all the memory that accumulation is meant to save.",
        )
    if graphs_held:
        raise Wrong(
            yours=f"the graphs of {graphs_held + 1} micro-batches at once",
            expected="the graph of one at a time",
            hint="Call backward for each micro-batch: a sum of losses keeps every graph.",
        )


class Augmented(Dataset):
    """A dataset of (index, input, label); noise from PyTorch's CPU generator is added to inputs."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = torch.randn(FEATURES) / 2
        return index, self.inputs[index] + noise, self.labels[index]


class Trainer:
    """A training run that records which items were in each batch, and the loss at each step."""

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
    """A mode that counts what makes the host wait: copies from ``device_type`` to the CPU."""

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
    """A mode that counts, by source device, the elements that are copied to another device.

    Tensors that don't require a gradient, such as labels, aren't counted.
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
