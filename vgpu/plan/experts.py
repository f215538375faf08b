"""Experts that replace a block's feed-forward layer; each token goes through a few of them.

A router picks ``per_token`` experts for each token. Each expert has a number of slots, given by
``capacity``; tokens are sorted into them and dropped if an expert has none left, and the experts'
products are one grouped product. A capacity of 1 costs as much as dropless training with a router
that keeps experts equally busy; a larger one says how much busier the busiest expert is.

With expert parallelism, each rank has some of the experts, and slots are sent to their ranks and
back (all-to-all), forward and backward, as in GShard.

Left out: the losses that keep experts equally busy, limiting a token's experts to groups of hosts,
the host's wait for how many tokens go where, and experts in float8.

Sources: Lepikhin et al., 2020, GShard; Jiang et al., 2024, Mixtral of experts; DeepSeek-AI, 2024,
DeepSeek-V3 technical report (shared experts).
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of each block's experts."""

    count: int
    per_token: int
    width: int  # inside an expert
    shared_width: int = 0  # inside a shared expert, which every token goes through; 0: none
    dense_layers: int = 0  # first blocks, which have a feed-forward layer instead
    capacity: float = 1.0  # an expert's slots, relative to an equal share of the tokens

    def check(self) -> None:
        """Raise ValueError for sizes that no ``Experts`` can have."""
        for name, least in (
            ("count", 1),
            ("per_token", 1),
            ("width", 1),
            ("shared_width", 0),
            ("dense_layers", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} of experts must be a whole number of at least {least}, got {value!r}"
                )
        if self.per_token > self.count:
            raise ValueError(
                f"a token can't go through {self.per_token} of {self.count} experts: give at least as "
                "many experts"
            )
        if not 0 < self.capacity <= self.count:
            raise ValueError(
                f"capacity of experts must be above 0 and at most their count, {self.count}, got "
                f"{self.capacity!r}"
            )


class Experts(nn.Module):
    """Input and output are (B, S, width). SwiGLU in each expert, weighted by the router."""

    def __init__(self, width: int, sizes: ExpertSizes, shared: nn.Module | None) -> None:
        """shared: a module that every token also goes through."""
        super().__init__()
        self.sizes, self.shared = sizes, shared
        self.router = nn.Parameter(torch.empty(sizes.count, width))
        self.own = GroupedFeedForward(sizes.count, width, sizes.width)
        self.group: dist.ProcessGroup | None = None
        nn.init.normal_(self.router, std=width**-0.5)

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the experts, on a one-dimensional mesh."""
        self.group = mesh.get_group()
        self.own.keep(mesh.get_local_rank(), mesh.size())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)  # (T, width)
        token_of, weights = self._slots(tokens)
        slots = F.pad(tokens, (0, 0, 0, 1))[token_of]  # (experts · slots of each, width)
        done = self._compute(slots) * weights.to(slots.dtype)[:, None]
        output = torch.zeros_like(F.pad(tokens, (0, 0, 0, 1))).index_add(0, token_of, done)[:-1]
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view_as(hidden)

    def _slots(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each slot, expert by expert: its token, or T for none, and the router's weight."""
        sizes, count = self.sizes, len(tokens)
        each = math.ceil(count * sizes.per_token * sizes.capacity / sizes.count)
        chances = F.linear(tokens, self.router).float().softmax(-1)
        weights, experts = chances.topk(sizes.per_token)  # (T, per_token)
        expert, order = experts.flatten().sort(stable=True)
        first = torch.searchsorted(expert, torch.arange(sizes.count, device=tokens.device))
        place = torch.arange(len(order), device=tokens.device) - first[expert]
        slot = torch.where(place < each, expert * each + place, sizes.count * each)
        token_of = torch.full_like(slot[:1], count).expand(sizes.count * each + 1)
        token_of = token_of.scatter(0, slot, order // sizes.per_token)[:-1]
        given = (weights / weights.sum(-1, keepdim=True)).flatten()[order]
        weight_of = torch.zeros_like(given[:1]).expand(sizes.count * each + 1)
        return token_of, weight_of.scatter(0, slot, given)[:-1]

    def _compute(self, slots: torch.Tensor) -> torch.Tensor:
        """Input and output are (experts · slots of each, width)."""
        if self.group is None:
            return self.own(slots.unflatten(0, (self.sizes.count, -1))).flatten(0, 1)
        parts = self.group.size()
        # From each rank, its slots for my experts: (ranks, my experts, slots of each, width).
        received = _Exchange.apply(slots, self.group)
        received = received.unflatten(0, (parts, self.sizes.count // parts, -1))
        done = self.own(received.transpose(0, 1).flatten(1, 2))
        returned = done.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 2)
        return _Exchange.apply(returned.contiguous(), self.group)


class GroupedFeedForward(nn.Module):
    """Input and output are (experts, slots, width): each expert's SwiGLU, as grouped products."""

    def __init__(self, count: int, width: int, inside: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, width, inside))
        self.up = nn.Parameter(torch.empty(count, width, inside))
        self.down = nn.Parameter(torch.empty(count, inside, width))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=weight.size(1) ** -0.5)

    def keep(self, part: int, parts: int) -> None:
        """Keep one of ``parts`` equal parts of the experts, in place."""
        for name, weight in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(weight.detach().chunk(parts)[part].clone()))

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        inside = F.silu(torch.bmm(slots, self.gate)) * torch.bmm(slots, self.up)
        return torch.bmm(inside, self.down)


class _Exchange(torch.autograd.Function):
    """Each rank of a group sends equal parts of its rows to all ranks; the gradients go back."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, ctx.group), None
