"""A GPT in Megatron-LM's form, as one rank of its tensor-parallel group on a virtual cluster.

After NVIDIA/Megatron-LM as of Narayanan et al., 2021, and Korthikanti et al., 2022. Activations are
(sequence, micro-batch, width), so that heads are views; queries, keys and values come from one
product; the mask is part of the softmax kernel and costs nothing here; dropout of 0.1 after softmax
and after both halves of a layer; float16. With sequence parallelism a column product keeps its own
part of the input, and gathers the others' once more backward, beside the other product.

Left out of the loss: three all-reduces of one number for each token.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, SEQUENCE, DROPOUT = 51_200, 2048, 0.1


class GPTSizes(NamedTuple):
    layers: int
    width: int
    heads: int

    @property
    def parameters(self) -> int:
        """With biases, norms and positions (Narayanan et al., equation 2)."""
        h, layers = self.width, self.layers
        return 12 * layers * h * h + 13 * layers * h + (VOCABULARY + SEQUENCE) * h


@dataclass(frozen=True)
class Recipe:
    """How a layer is split, and what of it is computed again."""

    group: dist.ProcessGroup  # the ranks that share each tensor
    recompute: str = "full"  # or "selective", for attention only, or "none"
    sequence_parallel: bool = False
    beside: bool = True  # whether gradients are summed beside the next product (from 2022 on)

    @property
    def parts(self) -> int:
        return self.group.size()


def _gathered(part: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    whole = part.new_empty(part.size(0) * group.size(), *part.shape[1:])
    return whole, dist.all_gather_single(whole, part, group, async_op=True)


def _scattered(whole: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    part = whole.new_empty(whole.size(0) // group.size(), *whole.shape[1:])
    return part, dist.reduce_scatter_single(part, whole, group=group, async_op=True)


class _Columns(torch.autograd.Function):
    """A product whose result is split: what is gathered before it is not kept."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, recipe):
        ctx.save_for_backward(hidden, weight)
        ctx.recipe = recipe
        if recipe.sequence_parallel:
            hidden, gathering = _gathered(hidden, recipe.group)
            gathering.wait()
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        recipe, sending = ctx.recipe, None
        if recipe.sequence_parallel:
            hidden, gathering = _gathered(hidden, recipe.group)
        of_input = gradient @ weight
        if recipe.sequence_parallel:
            gathering.wait()
            of_input, sending = _scattered(of_input, recipe.group)
        elif recipe.parts > 1:
            sending = dist.all_reduce(of_input, group=recipe.group, async_op=True)
            if not recipe.beside:
                sending.wait()
        rows = gradient.flatten(0, 1)
        of_weight, of_bias = rows.t() @ hidden.flatten(0, 1), rows.sum(0)
        if sending is not None:
            sending.wait()
        return of_input, of_weight, of_bias, None


class _Summed(torch.autograd.Function):
    """The sum of all parts, or with sequence parallelism a part of the sum."""

    @staticmethod
    def forward(ctx, hidden, recipe):
        ctx.recipe = recipe
        if recipe.sequence_parallel:
            hidden, sending = _scattered(hidden, recipe.group)
            sending.wait()
        elif recipe.parts > 1:
            dist.all_reduce(hidden, group=recipe.group)
        return hidden

    @staticmethod
    def backward(ctx, gradient):
        if ctx.recipe.sequence_parallel:
            gradient, gathering = _gathered(gradient, ctx.recipe.group)
            gathering.wait()
        return gradient, None


class Columns(nn.Module):
    """(S, B, inputs) to (S, B, outputs / t)."""

    def __init__(self, inputs: int, outputs: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(outputs // recipe.parts, inputs))
        self.bias = nn.Parameter(torch.empty(outputs // recipe.parts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Columns.apply(hidden, self.weight, self.bias, self.recipe)


class Rows(nn.Module):
    """(S, B, inputs / t) to (S, B, outputs)."""

    def __init__(self, inputs: int, outputs: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(outputs, inputs // recipe.parts))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(F.linear(hidden, self.weight), self.recipe) + self.bias


class Attention(nn.Module):
    """(S, B, width) in and out; a rank has its part of the heads."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.recompute = recipe.recompute
        self.heads_in = Columns(sizes.width, 3 * sizes.width, recipe)
        self.output = Rows(sizes.width, sizes.width, recipe)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.heads_in(hidden)  # (S, B, 3 width / t)
        length, batch = mixed.shape[:2]
        split = mixed.view(length, -1, 3 * self.head_width)  # (S, B heads / t, 3 head_width)
        parts = [part.transpose(0, 1) for part in split.chunk(3, -1)]
        again = self.recompute == "selective"
        seen = checkpoint(_seen, *parts, use_reentrant=False) if again else _seen(*parts)
        return self.output(seen.transpose(0, 1).reshape(length, batch, -1))


def _seen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B heads, S, head_width) each, and out."""
    weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)  # scaled and masked in there
    return torch.bmm(F.dropout(weights, DROPOUT), value)


class Layer(nn.Module):
    """(S, B, width) in and out; with sequence parallelism, a rank's part of S."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes, recipe)
        self.feed_forward_norm = nn.LayerNorm(sizes.width)
        self.up = Columns(sizes.width, 4 * sizes.width, recipe)
        self.down = Rows(4 * sizes.width, sizes.width, recipe)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = self.attention(self.attention_norm(hidden))
        hidden = hidden + F.dropout(seen, DROPOUT)
        fed = self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))
        return hidden + F.dropout(fed, DROPOUT)


class Layers(nn.Module):
    """(S, B, width) in and out, or a rank's part of S."""

    def __init__(self, sizes: GPTSizes, count: int, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute
        self.layers = nn.ModuleList(Layer(sizes, recipe) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            again = self.recompute == "full"
            hidden = checkpoint(layer, hidden, use_reentrant=False) if again else layer(hidden)
        return hidden


class Embedding(nn.Module):
    """(S, B) tokens in, (S, B, width) out, or a rank's part of S."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.tokens = nn.Embedding(VOCABULARY // recipe.parts, sizes.width)
        self.positions = nn.Embedding(SEQUENCE, sizes.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = _Summed.apply(self.tokens(tokens), self.recipe)
        positions = torch.zeros_like(tokens[: hidden.size(0)])
        return F.dropout(hidden + self.positions(positions), DROPOUT)


class Loss(nn.Module):
    """The last norm, the product with the vocabulary, and the loss of a rank's part of it."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.output = Columns(sizes.width, VOCABULARY, recipe)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.norm(hidden))  # (S, B, vocabulary / t)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
