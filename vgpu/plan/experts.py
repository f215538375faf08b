"""Experts, which replace a block's feed-forward layer.

A router picks ``per_token`` experts for each token. All experts have the same number of slots,
which follows from ``capacity``. Tokens are sorted into the slots, and dropped if an expert has
none left. SwiGLU has two matmuls, one of them for both the gate and the values that it gates; each
is batched over the experts. A capacity of 1 costs as much as dropless training with balanced
experts; a larger capacity costs as much as if the busiest expert had that many times the mean load.

The router's weights multiply the inner values of experts, which are narrow, if the rank that runs
the experts has the weights; otherwise, they multiply the outputs.

With expert parallelism, each rank has some of the experts, and slots are sent to their ranks and
back (all-to-all), forward and backward; as in GShard, each token is sent once per expert. With
``ranks_per_token``, a token's experts are on at most that many ranks. The token is sent to each
of them once, along with its weights, and sorted into slots there.

Not modeled: load-balancing losses, the host's wait for token counts, and experts in float8.

Sources: Lepikhin et al., 2020, GShard; Jiang et al., 2024, Mixtral of experts; DeepSeek-AI, 2024,
DeepSeek-V2 (device-limited routing) and DeepSeek-V3 technical report (shared experts); one matrix
for gates and values, and weights inside: GroupedExpertsDeepEP in NVIDIA-NeMo/Automodel,
nemo_automodel/components/moe/layers.py at 89e3a9f, and Megatron-LM since MCore v0.13 (the README of
megatron/core/transformer/moe).
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from vgpu.time.costs import check_count


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of each block's experts."""

    count: int
    per_token: int
    width: int  # inner width of an expert
    shared_width: int = 0  # of a shared expert, which every token goes through; 0: none
    dense_layers: int = 0  # leading blocks with a dense feed-forward layer instead of experts
    capacity: float = 1.0  # slots per expert, relative to an equal share of the tokens
    ranks_per_token: int | None = None  # limit for ep ranks with a token's experts; None: no limit

    def check(self) -> None:
        """Raise ValueError if no ``Experts`` can have these sizes."""
        for name in ("count", "per_token", "width"):
            check_count(f"{name} of the experts", getattr(self, name))
        for name in ("shared_width", "dense_layers"):
            check_count(f"{name} of the experts", getattr(self, name), 0)
        if self.ranks_per_token is not None:
            check_count("ranks_per_token of the experts", self.ranks_per_token)
        if self.per_token > self.count:
            raise ValueError(
                f"a token can't go through {self.per_token} of {self.count} experts: use at least "
                f"{self.per_token} experts"
            )
        is_number = isinstance(self.capacity, int | float)
        if not is_number or not 0 < self.capacity <= self.count:
            raise ValueError(
                f"capacity must be above 0 and at most the number of experts ({self.count}), got "
                f"{self.capacity!r}"
            )

    def check_division(self, ep: int) -> None:
        """Raise ValueError if the experts can't be divided evenly among ``ep`` ranks."""
        if self.count % ep:
            raise ValueError(f"{self.count} experts can't be divided evenly among {ep} ep ranks")
        limit = self.ranks_per_token
        if limit is not None and (limit > ep or limit * (self.count // ep) < self.per_token):
            raise ValueError(
                f"a token's {self.per_token} experts can't be on {limit} of {ep} ep ranks, which "
                f"have {self.count // ep} each: change ranks_per_token"
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
        """Keep only this rank's part of the experts; the mesh has one dimension."""
        self.group = mesh.get_group()
        self.own.keep(mesh.get_local_rank(), mesh.size())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)  # (T, width)
        chances = F.linear(tokens, self.router).float().softmax(-1)  # (T, experts)
        if self.group is None or self.sizes.ranks_per_token is None:
            weights, experts = self._chosen(chances)
            slots = _Slots(experts, weights, self.sizes.count, self._each(len(tokens)))
            output = slots.added(self._compute(slots.taken(tokens), slots.weight_of), len(tokens))
        else:
            output = self._limited(tokens, chances, self.group, self.sizes.ranks_per_token)
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view_as(hidden)

    def _chosen(self, chances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and indices of each token's experts; both are (T, per_token)."""
        weights, experts = chances.topk(self.sizes.per_token)
        return weights / weights.sum(-1, keepdim=True), experts

    def _each(self, tokens: int) -> int:
        """Return how many slots each expert has for this many tokens."""
        sizes = self.sizes
        return math.ceil(tokens * sizes.per_token * sizes.capacity / sizes.count)

    def _limited(
        self, tokens: torch.Tensor, chances: torch.Tensor, group: dist.ProcessGroup, ranks: int
    ) -> torch.Tensor:
        """Send each token once to each of ``ranks`` ranks, and run its experts there."""
        parts, count = group.size(), len(tokens)
        of_ranks = chances.unflatten(-1, (parts, -1))  # (T, ranks, experts per rank)
        _, sent_to = of_ranks.amax(-1).topk(ranks)
        allowed = torch.zeros_like(of_ranks[..., 0]).scatter(1, sent_to, 1.0)
        weights, experts = self._chosen((of_ranks * allowed[..., None]).flatten(1))
        all_weights = (
            torch.zeros_like(chances).scatter(1, experts, weights).unflatten(1, (parts, -1))
        )
        # Each rank receives tokens, and the weights of its own experts for them.
        each = math.ceil(count * ranks * self.sizes.capacity / parts)
        rows = _Slots(sent_to, None, parts, each)
        rank_of = torch.arange(parts * each, device=tokens.device) // each
        given = F.pad(all_weights, (0, 0, 0, 0, 0, 1))[rows.token_of, rank_of]
        received = _Exchange.apply(rows.taken(tokens), group)
        given = _Exchange.apply(given, group)  # (rows, own experts), 0 where not chosen
        most = min(self.sizes.per_token, given.size(1))
        weights, experts = given.topk(most)
        experts = torch.where(weights > 0, experts, given.size(1))
        slots = _Slots(experts, weights, given.size(1), self._each(count * parts))
        done = self._run(slots.taken(received), slots.weight_of)
        returned = _Exchange.apply(slots.added(done, len(received)), group)
        return rows.added(returned, count)

    def _compute(self, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run the experts and weight their outputs, both (experts · slots per expert, width)."""
        if self.group is None:
            return self._run(slots, weights)
        parts = self.group.size()
        # Each rank's slots for this rank's experts: (ranks, own experts, slots per expert, width).
        received = _Exchange.apply(slots, self.group)
        received = received.unflatten(0, (parts, self.sizes.count // parts, -1))
        done = self.own(received.transpose(0, 1).flatten(1, 2))
        returned = done.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 2)
        returned = _Exchange.apply(returned.contiguous(), self.group)
        return returned * weights.to(returned.dtype)[:, None]

    def _run(self, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts; ``weights`` are (own experts · slots per expert)."""
        each = (len(self.own.down), -1)
        done = self.own(slots.unflatten(0, each), weights.unflatten(0, each))
        return done.flatten(0, 1)


class _Slots:
    """Slots for tokens, the same number for each receiver (an expert or a rank)."""

    def __init__(
        self, receivers: torch.Tensor, weights: torch.Tensor | None, count: int, each: int
    ) -> None:
        """``receivers`` is (T, k), with values from 0 to ``count``; ``count`` means no receiver.

        ``weights``, if any, are (T, k), too; ``weight_of`` has each slot's.
        """
        tokens, k = receivers.shape
        receiver, order = receivers.flatten().sort(stable=True)
        first = torch.searchsorted(receiver, torch.arange(count + 1, device=receiver.device))
        place = torch.arange(len(order), device=receiver.device) - first[receiver]
        fits = (place < each) & (receiver < count)
        slot = torch.where(fits, receiver * each + place, count * each)
        token_of = torch.full_like(slot[:1], tokens).expand(count * each + 1)
        self.token_of = token_of.scatter(0, slot, order // k)[:-1]  # T marks an empty slot
        if weights is None:
            return
        weight_of = torch.zeros_like(weights.flatten()[:1]).expand(count * each + 1)
        self.weight_of = weight_of.scatter(0, slot, weights.flatten()[order])[:-1]

    def taken(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fill the slots: (T, width) to (slots, width); empty slots get zeros."""
        return F.pad(tokens, (0, 0, 0, 1))[self.token_of]

    def added(self, slots: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the sum of each token's slots: (slots, width) to (T, width)."""
        output = slots.new_zeros(tokens + 1, slots.size(1))
        return output.index_add(0, self.token_of, slots)[:-1]


class GroupedFeedForward(nn.Module):
    """Each expert's SwiGLU, as batched matmuls. Input and output are (experts, slots, width)."""

    def __init__(self, count: int, width: int, inside: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inside))
        self.down = nn.Parameter(torch.empty(count, inside, width))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.size(1) ** -0.5)

    def keep(self, part: int, parts: int) -> None:
        """Keep one of ``parts`` equal parts of the experts, in place."""
        for name, weight in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(weight.detach().chunk(parts)[part].clone()))

    def forward(self, slots: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """``weights``, (experts, slots), multiply the outputs."""
        gate, up = torch.bmm(slots, self.gate_up).chunk(2, -1)
        inside = F.silu(gate) * up
        if weights is not None:
            inside = inside * weights.to(inside.dtype)[..., None]
        return torch.bmm(inside, self.down)


class _Exchange(torch.autograd.Function):
    """Send equal parts of each rank's rows to all ranks of a group; the gradients go back."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, ctx.group), None
