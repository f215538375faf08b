"""Experts that replace a block's feed-forward layer; each token goes through a few of them.

A router picks ``per_token`` experts for each token. Each expert has a number of slots, given by
``capacity``; tokens are sorted into the slots and dropped if an expert has none left, and the experts'
matmuls are one grouped matmul. A capacity of 1 costs as much as dropless training with a router
that balances the experts' load; a larger one says how much more load the busiest expert has.

With expert parallelism, each rank has some of the experts, and slots are sent to their ranks and
back (all-to-all), forward and backward, as in GShard: a token once for each of its experts. With
``ranks_per_token``, a token's experts are on that many ranks at most. The token is sent once to each
of these, along with its weights, and sorted into slots there.

This leaves out load-balancing losses, the host's wait for how many tokens go where, and experts in
float8.

Sources: Lepikhin et al., 2020, GShard; Jiang et al., 2024, Mixtral of experts; DeepSeek-AI, 2024,
DeepSeek-V2 (device-limited routing) and DeepSeek-V3 technical report (shared experts).
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
    ranks_per_token: int | None = None  # most ranks of ep that have a token's experts; None: any

    def check(self) -> None:
        """Raise ValueError for sizes that no ``Experts`` can have."""
        for name, least in (
            ("count", 1),
            ("per_token", 1),
            ("width", 1),
            ("shared_width", 0),
            ("dense_layers", 0),
            ("ranks_per_token", 1),
        ):
            value = getattr(self, name)
            if name == "ranks_per_token" and value is None:
                continue
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

    def check_division(self, ep: int) -> None:
        """Raise ValueError if the experts can't be divided among this many ranks."""
        if self.count % ep:
            raise ValueError(f"{self.count} experts can't be divided among {ep} ranks of ep")
        limit = self.ranks_per_token
        if limit is not None and (limit > ep or limit * (self.count // ep) < self.per_token):
            raise ValueError(
                f"a token's {self.per_token} experts can't be on {limit} of {ep} ranks of ep, which have "
                f"{self.count // ep} each: give another number of ranks_per_token"
            )


class Experts(nn.Module):
    """SwiGLU in each expert, weighted by the router. Input and output are (B, S, width)."""

    def __init__(self, width: int, sizes: ExpertSizes, shared: nn.Module | None) -> None:
        """``shared`` is a module that every token also goes through."""
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
        chances = F.linear(tokens, self.router).float().softmax(-1)  # (T, experts)
        if self.group is None or self.sizes.ranks_per_token is None:
            weights, experts = self._chosen(chances)
            slots = _Slots(experts, weights, self.sizes.count, self._each(len(tokens)))
            output = slots.added(self._compute(slots.taken(tokens)), len(tokens))
        else:
            output = self._limited(tokens, chances, self.group, self.sizes.ranks_per_token)
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view_as(hidden)

    def _chosen(self, chances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each token, the weights and numbers of its experts; both are (T, per_token)."""
        weights, experts = chances.topk(self.sizes.per_token)
        return weights / weights.sum(-1, keepdim=True), experts

    def _each(self, tokens: int) -> int:
        """Return how many slots each expert has for this many tokens."""
        sizes = self.sizes
        return math.ceil(tokens * sizes.per_token * sizes.capacity / sizes.count)

    def _limited(
        self, tokens: torch.Tensor, chances: torch.Tensor, group: dist.ProcessGroup, ranks: int
    ) -> torch.Tensor:
        """Send each token to ``ranks`` ranks, once to each, and compute its experts there."""
        parts, count = group.size(), len(tokens)
        of_ranks = chances.unflatten(-1, (parts, -1))  # (T, ranks, experts of each)
        _, sent_to = of_ranks.amax(-1).topk(ranks)
        allowed = torch.zeros_like(of_ranks[..., 0]).scatter(1, sent_to, 1.0)
        weights, experts = self._chosen((of_ranks * allowed[..., None]).flatten(1))
        all_weights = (
            torch.zeros_like(chances).scatter(1, experts, weights).unflatten(1, (parts, -1))
        )
        # Each rank receives tokens, and the weights of its own experts for them.
        each = math.ceil(count * ranks * self.sizes.capacity / parts)
        rows = _Slots(sent_to, torch.ones_like(sent_to, dtype=tokens.dtype), parts, each)
        rank_of = torch.arange(parts * each, device=tokens.device) // each
        given = F.pad(all_weights, (0, 0, 0, 0, 0, 1))[rows.token_of, rank_of]
        received = _Exchange.apply(rows.taken(tokens), group)
        given = _Exchange.apply(given, group)  # (rows, own experts), 0 where not chosen
        most = min(self.sizes.per_token, given.size(1))
        weights, experts = given.topk(most)
        experts = torch.where(weights > 0, experts, given.size(1))
        slots = _Slots(experts, weights, given.size(1), self._each(count * parts))
        done = self.own(slots.taken(received).unflatten(0, (given.size(1), -1))).flatten(0, 1)
        returned = _Exchange.apply(slots.added(done, len(received)), group)
        return rows.added(returned, count)

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


class _Slots:
    """Slots for tokens, the same number for each receiver (an expert or a rank)."""

    def __init__(
        self, receivers: torch.Tensor, weights: torch.Tensor, count: int, each: int
    ) -> None:
        """``receivers`` are (T, several), each from 0 to ``count``, which means none."""
        tokens, several = receivers.shape
        receiver, order = receivers.flatten().sort(stable=True)
        first = torch.searchsorted(receiver, torch.arange(count + 1, device=receiver.device))
        place = torch.arange(len(order), device=receiver.device) - first[receiver]
        fits = (place < each) & (receiver < count)
        slot = torch.where(fits, receiver * each + place, count * each)
        token_of = torch.full_like(slot[:1], tokens).expand(count * each + 1)
        self.token_of = token_of.scatter(0, slot, order // several)[:-1]  # T for none
        weight_of = torch.zeros_like(weights.flatten()[:1]).expand(count * each + 1)
        self._weight_of = weight_of.scatter(0, slot, weights.flatten()[order])[:-1]

    def taken(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fill the slots: (T, width) to (slots, width), with zeros in empty ones."""
        return F.pad(tokens, (0, 0, 0, 1))[self.token_of]

    def added(self, slots: torch.Tensor, tokens: int) -> torch.Tensor:
        """Sum each token's slots by weight: (slots, width) to (T, width)."""
        weighted = slots * self._weight_of.to(slots.dtype)[:, None]
        output = weighted.new_zeros(tokens + 1, slots.size(1))
        return output.index_add(0, self.token_of, weighted)[:-1]


class GroupedFeedForward(nn.Module):
    """Each expert's SwiGLU, as grouped matmuls. Input and output are (experts, slots, width)."""

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
    """Sends equal parts of each rank's rows to all ranks of a group; the gradients go back."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, ctx.group), None
