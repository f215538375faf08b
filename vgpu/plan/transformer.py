"""A Llama-style decoder-only transformer, with or without experts, and published models' sizes."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from vgpu.plan.experts import Experts, ExpertSizes
from vgpu.time.costs import check_count

FORMS = ("llama", "gpt")
"""Llama has RMSNorm, rotary positions and SwiGLU with three matrices; GPT has LayerNorm, learned
positions and GELU with two matrices. Here, neither has biases."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of multi-head latent attention (DeepSeek-AI, 2024, DeepSeek-V2, section 2.1).

    Queries are computed from a narrow latent vector, and keys and values from another. Rotary
    positions have their own part of each query head, and one key that all heads share.
    """

    query_rank: int = 1536  # width of the latent vector for queries
    key_value_rank: int = 512  # width of the latent vector for keys and values
    rotary_width: int = 64  # width that rotary positions add to each head's query and key

    def check(self) -> None:
        """Raise ValueError if no ``LatentAttention`` can have these sizes."""
        for name, count in vars(self).items():
            check_count(f"{name} of the latent attention", count)
        if self.rotary_width % 2:
            raise ValueError(
                "rotary_width must be even, since rotary positions rotate pairs of values, got "
                f"{self.rotary_width}"
            )


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes of a decoder-only transformer in the style of Llama or GPT."""

    layers: int
    width: int
    heads: int
    key_value_heads: int  # heads / key_value_heads query heads share each one
    feed_forward: int
    vocabulary: int
    sequence: int = 8192  # maximum length
    # Llama 3's; a larger base distinguishes positions that are farther apart.
    rotary_base: float = 500_000.0
    form: str = "llama"  # one of ``FORMS``
    experts: ExpertSizes | None = None  # in place of the blocks' feed-forward layers
    head_size: int | None = None  # width of a head, if it isn't width / heads
    latent: LatentSizes | None = None  # for multi-head latent attention

    def check(self) -> None:
        """Raise ValueError if no ``Transformer`` can have these sizes."""
        for name, count in vars(self).items():
            if name not in ("rotary_base", "form", "experts", "head_size", "latent"):
                check_count(name, count)
        for name, kind in (("experts", ExpertSizes), ("latent", LatentSizes)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be {kind.__name__}(…) or None, got {value!r}")
        if self.experts is not None:
            self.experts.check()
            if self.experts.dense_layers >= self.layers:
                raise ValueError(
                    f"{self.experts.dense_layers} dense layers leave none of {self.layers} layers "
                    "for experts"
                )
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        base = self.rotary_base
        if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < math.inf:
            raise ValueError(f"rotary_base must be a finite number above 0, got {base!r}")
        if self.head_size is not None:
            check_count("head_size", self.head_size)
            if self.head_size % 2 and self.latent is None:
                raise ValueError(
                    f"head_size must be even, since rotary positions rotate pairs of values, got "
                    f"{self.head_size}"
                )
        elif self.width % (2 * self.heads):
            raise ValueError(
                f"a width of {self.width} can't be divided into {self.heads} heads of an even "
                "width: rotary positions rotate pairs of values"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.heads} heads can't be divided evenly among {self.key_value_heads} "
                "key-value heads: each must be shared by the same number of heads"
            )
        if self.latent is not None:
            self.latent.check()
            if self.key_value_heads != self.heads or self.form != "llama":
                raise ValueError(
                    "latent attention needs as many key-value heads as heads, and form='llama', "
                    f"got {self.key_value_heads} for {self.heads} heads, and {self.form!r}"
                )

    def reject_experts_and_latent(self, what: str) -> None:
        """Raise ValueError for experts or latent attention, which ``what`` doesn't model."""
        if self.experts is not None or self.latent is not None:
            kind = "experts" if self.experts is not None else "latent attention"
            raise ValueError(
                f"{what} isn't modeled for models with {kind}: use sizes without {kind}"
            )

    @property
    def head_width(self) -> int:
        """The width of a head, without what latent attention adds for rotary positions."""
        return self.head_size or self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that rotary positions rotate."""
        return self.head_width if self.latent is None else self.latent.rotary_width

    @property
    def query_width(self) -> int:
        """The total width of all query heads."""
        added = 0 if self.latent is None else self.latent.rotary_width
        return (self.head_width + added) * self.heads

    @property
    def attended_width(self) -> int:
        """The total width of what all heads' attention returns."""
        return self.head_width * self.heads

    @property
    def key_value_width(self) -> int:
        """The total width of all key heads, or of all value heads."""
        return self.head_width * self.key_value_heads

    @property
    def block_products(self) -> int:
        """The number of parameters in the matmuls of a block without experts."""
        return (
            self._attention_products + self.feed_forward_products * self.width * self.feed_forward
        )

    @property
    def _attention_products(self) -> int:
        if self.latent is None:
            return 2 * self.width * (self.query_width + self.key_value_width)
        query, both = self.latent.query_rank, self.latent.key_value_rank
        return (
            self.width * (query + both + self.latent.rotary_width)
            + query * self.query_width
            + both * 2 * self.key_value_width
            + self.attended_width * self.width
        )

    @property
    def token_products(self) -> int:
        """The number of parameters in the matmuls that a token goes through in all blocks."""
        return self._all_products(0 if self.experts is None else self.experts.per_token)

    @property
    def expert_products(self) -> int:
        """The number of parameters in the experts of all blocks, which ``ep`` ranks share."""
        if self.experts is None:
            return 0
        layers = self.layers - self.experts.dense_layers
        return layers * 3 * self.width * self.experts.width * self.experts.count

    def _all_products(self, count: int) -> int:
        """Count the parameters in all blocks' matmuls, with ``count`` experts per block."""
        experts = self.experts
        if experts is None:
            return self.layers * self.block_products
        inside = count * experts.width + experts.shared_width
        each = self._attention_products + self.width * (3 * inside + experts.count)
        layers = self.layers - experts.dense_layers
        return experts.dense_layers * self.block_products + layers * each

    def least_inside(self, routed: bool = True) -> int:
        """Return the smallest inner width of any block's feed-forward layer or experts, per token.

        Without ``routed``, experts that not every token goes through don't count.
        """
        if self.experts is None:
            return self.feed_forward
        inside = self.experts.shared_width
        if routed:
            slots = self.experts.per_token * min(self.experts.capacity, 1.0)
            inside += int(slots * self.experts.width)
        return min(inside, self.feed_forward) if self.experts.dense_layers else inside

    @property
    def feed_forward_products(self) -> int:
        """The number of matrices in a block's feed-forward layer."""
        return 3 if self.form == "llama" else 2

    @property
    def blocks_parameters(self) -> int:
        """The number of parameters in all blocks, including their norms."""
        count = 0 if self.experts is None else self.experts.count
        norms = 2 * self.width
        if self.latent is not None:
            norms += self.latent.query_rank + self.latent.key_value_rank
        return self._all_products(count) + self.layers * norms

    @property
    def parameters(self) -> int:
        """The number of parameters in the entire ``Transformer``."""
        positions = 0 if self.form == "llama" else self.sequence
        ends = (2 * self.vocabulary + positions + 1) * self.width
        return self.blocks_parameters + ends


# Grattafiori et al., 2024, The Llama 3 herd of models, table 3.
LLAMA = {
    "8B": TransformerSizes(32, 4096, 32, 8, 14336, 128_256),
    "70B": TransformerSizes(80, 8192, 64, 8, 28672, 128_256),
    "405B": TransformerSizes(126, 16384, 128, 8, 53248, 128_256),
}

# Jiang et al., 2024, Mixtral of experts, table 1; and the configuration of Mixtral-8x22B-v0.1.
MIXTRAL = {
    "8x7B": TransformerSizes(
        32, 4096, 32, 8, 14336, 32_000, rotary_base=1e6, experts=ExpertSizes(8, 2, 14336)
    ),
    "8x22B": TransformerSizes(
        56, 6144, 48, 8, 16384, 32_768, rotary_base=1e6, experts=ExpertSizes(8, 2, 16384)
    ),
}

# DeepSeek-AI, 2024, DeepSeek-V2, section 3.1.2, and DeepSeek-V3 technical report, section 4.2,
# without the module that predicts a second token.
DEEPSEEK = {
    "DeepSeek-V2": TransformerSizes(
        60,
        5120,
        128,
        128,
        12_288,
        102_400,
        sequence=4096,
        rotary_base=1e4,
        head_size=128,
        latent=LatentSizes(),
        experts=ExpertSizes(160, 6, 1536, shared_width=2 * 1536, dense_layers=1),
    ),
    "DeepSeek-V3": TransformerSizes(
        61,
        7168,
        128,
        128,
        18_432,
        129_280,
        sequence=4096,
        rotary_base=1e4,
        head_size=128,
        latent=LatentSizes(),
        experts=ExpertSizes(256, 8, 2048, shared_width=2048, dense_layers=3),
    ),
}

# A model with 352,896 parameters, small enough to learn to predict characters on a CPU. With 64
# positions, a base of 20 rotates each pair of values far enough to be useful.
LETTERS = TransformerSizes(2, 128, 4, 4, 256, 96, sequence=64, rotary_base=20.0)


class Transformer(nn.Module):
    """A Llama-style decoder-only transformer, to train at small sizes or to run on shapes.

    It takes (B, S) integers and returns (B, S, vocabulary) logits. It has a norm before each
    attention and feed-forward layer, grouped-query or latent attention, and no biases; the rest
    depends on its form (``FORMS``). A pipeline stage has None in place of modules that other stages
    have.
    """

    embedding: nn.Module | None
    norm: nn.Module | None
    output: nn.Module | None
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = (
            None if sizes.form == "llama" else nn.Embedding(sizes.sequence, sizes.width)
        )
        dense = sizes.layers if sizes.experts is None else sizes.experts.dense_layers
        self.blocks = nn.ModuleList(
            TransformerBlock(sizes, has_experts=n >= dense) for n in range(sizes.layers)
        )
        self.norm = norm(sizes)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.sizes = sizes
        angles = rotary_angles(sizes.sequence, sizes.rotary_width, sizes.rotary_base)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @torch.no_grad()
    def initialize(self, seed: int = 0, only_buffers: bool = False) -> None:
        """Initialize every parameter and buffer in place, for a model created on the meta device.

        The values don't depend on how the model is sharded: each rank draws all of them on the
        host, one full parameter at a time, and keeps its part. With ``only_buffers``, parameters
        stay as they are, for a model that loads them next.
        """
        angles = rotary_angles(len(self.cos), self.sizes.rotary_width, self.sizes.rotary_base)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        if only_buffers:
            return
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                whole = torch.ones(parameter.shape)
            else:
                scale = 1.0 if name == "embedding.weight" else parameter.size(-1) ** -0.5
                whole = torch.empty(parameter.shape).normal_(0, scale, generator=generator)
            whole = whole.to(parameter.device)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            parameter.copy_(whole)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.size(1)
        if length > len(self.cos):
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {len(self.cos)} that this "
                "Transformer supports: truncate it, or create the model with a larger sequence."
            )
        if self.embedding is None:  # tensor-parallel ranks of a later stage get parts of sequences
            hidden, cos, sin = tokens, self.cos, self.sin
        else:
            hidden = self.embedding(tokens)  # (B, S, width)
            cos, sin = self.cos[:length], self.sin[:length]
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(length, device=tokens.device)[None])
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        if self.norm is None or self.output is None:
            return hidden
        return self.output(self.norm(hidden))


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward layer or experts, each with a residual connection."""

    def __init__(self, sizes: TransformerSizes, has_experts: bool = False) -> None:
        super().__init__()
        self.attention_norm = norm(sizes)
        self.attention: nn.Module = (
            CausalAttention(sizes) if sizes.latent is None else LatentAttention(sizes)
        )
        self.feed_forward_norm = norm(sizes)
        self.feed_forward: Any = _experts(sizes) if has_experts else FeedForward(sizes)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


def _experts(sizes: TransformerSizes) -> Experts:
    assert sizes.experts is not None
    inside = sizes.experts.shared_width
    shared = FeedForward(replace(sizes, feed_forward=inside)) if inside else None
    return Experts(sizes.width, sizes.experts, shared)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm as separate operations, as in Llama's own code and on GPUs before PyTorch 2.9.

    The values are the same. Since 2.9, nn.RMSNorm has been a single kernel on GPUs, and saves less
    for the backward pass; the published training runs that predictions are compared with used
    separate kernels.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        dims = list(range(-len(self.normalized_shape), 0))
        scale = wide.pow(2).mean(dims, keepdim=True).add_(eps).rsqrt()
        normal = wide * scale
        if self.weight is not None:
            normal = normal * self.weight
        return normal.type_as(x)


def norm(sizes: TransformerSizes) -> nn.Module:
    return RMSNorm(sizes.width) if sizes.form == "llama" else nn.LayerNorm(sizes.width, bias=False)


def _keep_size(*layers: nn.Linear) -> None:
    """Initialize the weights so that outputs are about as large as inputs.

    With nn.Linear's own initialization, outputs are smaller by a factor of the square root of
    three. After two or three layers in a row, a block would add little to its input, and be
    slow to learn.
    """
    for layer in layers:
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")


class CausalAttention(nn.Module):
    """Causal attention, with or without rotary positions. Input and output are (B, S, width)."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.head_width, narrow = sizes.head_width, sizes.key_value_width
        self.is_rotary = sizes.form == "llama"
        self.query = nn.Linear(sizes.width, sizes.query_width, bias=False)
        self.key = nn.Linear(sizes.width, narrow, bias=False)
        self.value = nn.Linear(sizes.width, narrow, bias=False)
        self.output = nn.Linear(sizes.query_width, sizes.width, bias=False)
        _keep_size(self.value, self.output)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # The number of heads follows from the widths, so a rank may hold only some of them.
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )  # (B, heads, S, head_width)
        if self.is_rotary:
            query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(seen.transpose(1, 2).flatten(-2))


class LatentAttention(nn.Module):
    """Causal multi-head latent attention (DeepSeek-V2). Input and output are (B, S, width).

    Values are padded to the width of queries and keys, as in DeepSeek's own code for
    FlashAttention-2, since PyTorch's flash-attention kernel takes heads of a single width. Context
    parallelism gathers the padded heads.
    """

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        assert sizes.latent is not None
        self.head_width, self.rotary_width = sizes.head_width, sizes.latent.rotary_width
        query, both = sizes.latent.query_rank, sizes.latent.key_value_rank
        self.query_down = nn.Linear(sizes.width, query, bias=False)
        self.query_norm = RMSNorm(query)
        self.query_up = nn.Linear(query, sizes.query_width, bias=False)
        self.key_value_down = nn.Linear(sizes.width, both + self.rotary_width, bias=False)
        self.key_value_norm = RMSNorm(both)
        self.key_value_up = nn.Linear(both, 2 * sizes.key_value_width, bias=False)
        self.output = nn.Linear(sizes.attended_width, sizes.width, bias=False)
        _keep_size(self.key_value_down, self.key_value_up, self.output)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        own, rotary = self.head_width, self.rotary_width
        queries = self.query_up(self.query_norm(self.query_down(hidden)))
        queries = queries.unflatten(-1, (-1, own + rotary)).transpose(1, 2)
        query, placed = queries.split([own, rotary], -1)  # (B, heads, S, own and rotary)
        query = torch.cat([query, rotated(placed, cos, sin)], -1)
        narrow = self.key_value_down(hidden)
        latent, shared = narrow.split([narrow.size(-1) - rotary, rotary], -1)
        shared = rotated(shared[:, None], cos, sin)  # (B, 1, S, rotary): the same for all heads
        both = self.key_value_up(self.key_value_norm(latent))
        key, value = both.unflatten(-1, (-1, 2 * own)).transpose(1, 2).chunk(2, -1)
        key = torch.cat([key, shared.expand(-1, key.size(1), -1, -1)], -1)
        seen = F.scaled_dot_product_attention(
            query, key, F.pad(value, (0, rotary)), is_causal=True
        )[..., :own]
        return self.output(seen.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020), where one matmul's output gates another's, or GELU with no gate."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.gate = (
            nn.Linear(sizes.width, sizes.feed_forward, bias=False)
            if sizes.form == "llama"
            else None
        )
        self.up = nn.Linear(sizes.width, sizes.feed_forward, bias=False)
        self.down = nn.Linear(sizes.feed_forward, sizes.width, bias=False)
        _keep_size(self.up, self.down)
        if self.gate is not None:
            _keep_size(self.gate)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(hidden)))
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def rotary_angles(length: int, head_width: int, base: float) -> torch.Tensor:
    """Return the angle by which each position rotates each pair: (length, head_width / 2).

    Source: Su et al., 2021, RoFormer.
    """
    pairs = torch.arange(0, head_width, 2) / head_width
    return torch.arange(length)[:, None] / base**pairs


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of adjacent values in (B, heads, S, head_width) by its position's angle.

    As in Llama's own code, each pair is a complex number, so a single multiplication rotates it.
    """
    wide = torch.promote_types(heads.dtype, torch.float32)
    pairs = torch.view_as_complex(heads.to(wide).unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(cos.to(wide), sin.to(wide))
    return torch.view_as_real(turned).flatten(-2).type_as(heads)
