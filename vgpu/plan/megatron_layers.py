"""Megatron-LM's layers, on one rank of a tensor-parallel group.

They match NVIDIA/Megatron-LM at the time of Narayanan et al., 2021, and Korthikanti et al., 2022.
Activations are (sequence, micro-batch, width), so heads are views. Queries, keys and values come
from one matmul. The mask is part of the softmax kernel and costs nothing here. Dropout follows the
softmax and both halves of a layer. With sequence parallelism, a column-parallel matmul saves only
its own part of the input, and gathers the other parts again in the backward pass, while the input's
gradient is computed. Options cover later versions: fused attention, grouped-query attention,
SwiGLU, and no dropout.
"""

import dataclasses
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
    sequence: int = SEQUENCE
    vocabulary: int = VOCABULARY
    key_value_heads: int | None = None  # None: as many as heads
    feed_forward: int | None = None  # None: four times the width
    gated: bool = False  # SwiGLU in place of GELU

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_value_width(self) -> int:
        """The total width of all key heads, or of all value heads."""
        return self.head_width * (self.key_value_heads or self.heads)

    @property
    def feed_forward_width(self) -> int:
        return self.feed_forward or 4 * self.width

    @property
    def layer_products(self) -> int:
        """The number of parameters in a layer's matmuls."""
        attention = 2 * self.width * (self.width + self.key_value_width)
        return attention + (3 if self.gated else 2) * self.width * self.feed_forward_width

    @property
    def parameters(self) -> int:
        """The total number of parameters, including biases, norms and positions.

        For GPT, this is equation 2 of Narayanan et al., 2021.
        """
        up = (2 if self.gated else 1) * self.feed_forward_width
        biases = 2 * self.width + 2 * self.key_value_width + self.width + up
        layer = self.layer_products + biases + 4 * self.width
        return self.layers * layer + (self.vocabulary + self.sequence) * self.width


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a layer is split, and which part of it is recomputed."""

    group: dist.ProcessGroup  # the ranks that share each tensor
    recompute: str = "full"  # or "selective", for attention only, or "none"
    sequence_parallel: bool = False
    beside: bool = True  # whether input gradients' all-reduces overlap with a matmul (since 2022)
    flash: bool = False  # whether attention is one fused kernel
    dropout: float = DROPOUT

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
    """A column-parallel matmul, whose output is split; its gathered input isn't saved."""

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
    """The sum of all ranks' tensors or, with sequence parallelism, a rank's part of the sum."""

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
    """A linear layer split by columns over t ranks: (S, B, inputs) to (S, B, outputs / t)."""

    def __init__(self, inputs: int, outputs: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(outputs // recipe.parts, inputs))
        self.bias = nn.Parameter(torch.empty(outputs // recipe.parts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Columns.apply(hidden, self.weight, self.bias, self.recipe)


class Rows(nn.Module):
    """A linear layer split by rows over t ranks: (S, B, inputs / t) to (S, B, outputs)."""

    def __init__(self, inputs: int, outputs: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(outputs, inputs // recipe.parts))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(F.linear(hidden, self.weight), self.recipe) + self.bias


class Attention(nn.Module):
    """Self-attention with a rank's part of the heads. Input and output are (S, B, width)."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.head_width = recipe, sizes.head_width
        self.widths = [
            width // recipe.parts
            for width in (sizes.width, sizes.key_value_width, sizes.key_value_width)
        ]
        self.heads_in = Columns(sizes.width, sum(self.widths) * recipe.parts, recipe)
        self.output = Rows(sizes.width, sizes.width, recipe)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.heads_in(hidden)  # (S, B, (width + 2 key_value_width) / t)
        if self.recipe.flash:
            return self.output(self._fused(mixed))
        length, batch = mixed.shape[:2]
        split = mixed.view(length, -1, 3 * self.head_width)  # (S, B · heads / t, 3 head_width)
        parts = [part.transpose(0, 1) for part in split.chunk(3, -1)]
        again = self.recipe.recompute == "selective"
        seen: torch.Tensor = (
            checkpoint(_seen, self.recipe.dropout, *parts, use_reentrant=False)
            if again
            else _seen(self.recipe.dropout, *parts)
        )
        return self.output(seen.transpose(0, 1).reshape(length, batch, -1))

    def _fused(self, mixed: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).permute(1, 2, 0, 3)
            for part in mixed.split(self.widths, -1)
        )  # (B, heads / t, S, head_width)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return seen.permute(2, 0, 1, 3).flatten(-2)


def _seen(
    dropout: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Compute attention; inputs and output are (B · heads / t, S, head_width)."""
    weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)  # includes scaling and masking
    return torch.bmm(_dropped(weights, dropout), value)


def _dropped(values: torch.Tensor, dropout: float) -> torch.Tensor:
    return F.dropout(values, dropout) if dropout else values


class Layer(nn.Module):
    """A layer: (S, B, width) to (S, B, width); with sequence parallelism, S is a rank's part."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.gated = recipe, sizes.gated
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes, recipe)
        self.feed_forward_norm = nn.LayerNorm(sizes.width)
        wide = sizes.feed_forward_width
        self.up = Columns(sizes.width, 2 * wide if sizes.gated else wide, recipe)
        self.down = Rows(wide, sizes.width, recipe)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # A variable would keep attention's output alive, and fused kernels would have to write it.
        hidden = hidden + _dropped(self.attention(self.attention_norm(hidden)), self.recipe.dropout)
        up = self.up(self.feed_forward_norm(hidden))
        if self.gated:
            gate, up = up.chunk(2, -1)
            fed = self.down(F.silu(gate) * up)
        else:
            fed = self.down(F.gelu(up))
        return hidden + _dropped(fed, self.recipe.dropout)


class Layers(nn.Module):
    """``count`` layers: (S, B, width) to (S, B, width), where S may be a rank's part."""

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
    """The embedding: (S, B) tokens to (S, B, width), where S may be a rank's part."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.tokens = nn.Embedding(sizes.vocabulary // recipe.parts, sizes.width)
        self.positions = nn.Embedding(sizes.sequence, sizes.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = _Summed.apply(self.tokens(tokens), self.recipe)
        positions = torch.zeros_like(tokens[: hidden.size(0)])
        return _dropped(hidden + self.positions(positions), self.recipe.dropout)


class _VocabularyLoss(torch.autograd.Function):
    """The cross-entropy of vocabulary-split logits, computed one kernel at a time.

    As in megatron/mpu/cross_entropy.py, there are three all-reduces of one value per token.
    """

    @staticmethod
    def forward(ctx, logits, tokens, recipe):
        largest = logits.max(-1)[0]
        _all_reduced(largest, recipe)
        logits = logits.sub_(largest[..., None])
        elsewhere = (tokens < 0) | (tokens >= logits.size(-1))  # on another rank
        own = (tokens - 0).masked_fill_(elsewhere, 0)
        predicted = logits.gather(-1, own[..., None])[..., 0].masked_fill_(elsewhere, 0.0)
        _all_reduced(predicted, recipe)
        logits = logits.exp_()
        sums = logits.sum(-1)
        _all_reduced(sums, recipe)
        ctx.save_for_backward(logits.div_(sums[..., None]), own, elsewhere)
        return sums.log() - predicted

    @staticmethod
    def backward(ctx, gradient):
        softmax, own, elsewhere = ctx.saved_tensors
        softmax.scatter_add_(-1, own[..., None], (elsewhere.float() - 1.0)[..., None])
        return softmax.mul_(gradient[..., None]), None, None


def _all_reduced(numbers: torch.Tensor, recipe: Recipe) -> None:
    if recipe.parts > 1:
        dist.all_reduce(numbers, group=recipe.group)


class Loss(nn.Module):
    """The final norm, the matmul with a rank's part of the vocabulary, and the loss."""

    def __init__(self, sizes: GPTSizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.norm = nn.LayerNorm(sizes.width)
        self.output = Columns(sizes.width, sizes.vocabulary, recipe)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.norm(hidden))  # (S, B, vocabulary / t)
        losses = _VocabularyLoss.apply(logits.float(), tokens, self.recipe)
        mask = torch.ones_like(losses)
        return (losses * mask).sum() / mask.sum()
