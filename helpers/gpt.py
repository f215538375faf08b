"""The GPT that ``notebooks/train.py`` trains; it can be made on the meta device and divided."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, S, width)
        # A rank of tensor parallelism has some of the heads, so they are counted here.
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3 * self.head_width))
        query, key, value = heads.transpose(1, 2).chunk(3, dim=-1)  # (B, heads, S, head_width)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each pair of numbers turned by an angle that grows with the position."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.type_as(heads)


class GPT(nn.Module):
    """(B, S) integers to (B, S, vocabulary) logits."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.recompute, self.head_width = False, width // heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        # Computed here: to_empty would lose the values of a buffer.
        turns = torch.arange(0, self.head_width, 2, device=tokens.device) / self.head_width
        angles = torch.arange(tokens.size(1), device=tokens.device)[:, None] / 10_000**turns
        cos, sin = angles.cos(), angles.sin()  # (S, head_width / 2)
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.output(self.norm(x))

    @torch.no_grad()
    def initialize(self) -> None:
        """The same numbers in every layout. Only one parameter at a time is whole, on the host."""
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.named_parameters():
            scale = 0.02 if "embedding" in name else parameter.size(-1) ** -0.5
            whole = scale * torch.randn(parameter.shape, generator=generator)
            whole = (torch.ones_like(whole) if "norm" in name else whole).to(parameter.device)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            parameter.copy_(whole)


_SEQUENCE = Shard(1)  # of (B, S, width): each rank has a part of every sequence
TENSOR_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE),
    "blocks.*.attention_norm": SequenceParallel(),
    "blocks.*.qkv": ColwiseParallel(input_layouts=_SEQUENCE),
    "blocks.*.project": RowwiseParallel(output_layouts=_SEQUENCE),
    "blocks.*.feed_forward_norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=_SEQUENCE),
    "blocks.*.down": RowwiseParallel(output_layouts=_SEQUENCE),
    "norm": SequenceParallel(),
    # The logits stay divided: torch's loss_parallel never gathers them.
    "output": ColwiseParallel(
        input_layouts=_SEQUENCE, output_layouts=Shard(-1), use_local_output=False
    ),
}
"""Tensor and sequence parallelism, for ``parallelize_module``."""
