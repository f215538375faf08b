"""How many forwards of a layer still hold what backward needs of them."""

import gc
import weakref

import torch
from torch import nn


class _Saved:
    """Lives as long as anything that one forward has saved for backward."""


class WatchedLinear(nn.Linear):
    """A linear layer that notes at each forward how many samples came, and what earlier ones hold.

    ``graphs_held`` has the number of earlier forwards through which backward has not gone yet, or has
    gone with ``retain_graph=True``. A loss that is kept after its backward holds nothing.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.samples: list[int] = []
        self.graphs_held: list[int] = []
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._saved:
            gc.collect()  # a graph in a reference cycle is not kept, only not yet found
        self.samples.append(len(input))
        self.graphs_held.append(len(self._saved))
        saved = _Saved()
        self._saved.add(saved)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor, saved), lambda packed: packed[0]
        ):
            return super().forward(input)
