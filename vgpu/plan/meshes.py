"""A mesh of GPUs: who talks to whom in each dimension, how much, and what that costs a step.

Arithmetic from sizes, for a transformer in the form of Llama that is cut four ways:

- ``tensor``: four all-reduces of a micro-batch's hidden states in each layer, with nothing computed
  beside them (Shoeybi et al., 2019, Megatron-LM);
- ``context``: keys and values go round a ring, beside attention; in backward their gradients go with
  them (Liu et al., 2023, Ring attention);
- ``pipeline``: hidden states to the next stage and their gradients back, for each micro-batch of
  one sequence; with 1F1B only those that fill and drain the pipeline are exposed;
- ``data``: parameters, in bfloat16, are gathered once a step, beside the first forward, and
  gradients, in float32, reduced once, beside the last backward. Ranks of ``context`` hold the same
  parameters, so they belong to these groups too.

Of each dimension it is the slowest group that counts, since the others wait for it: one that spans
hosts where others lie inside one. Seconds are a ``CostModel``'s. Left out: embedding and loss, norms,
the bytes of activations, recomputation, launches, dimensions that use a link at the same time, and
stages that differ.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vgpu import CostModel
from vgpu.collectives import table
from vgpu.plan.transformer import TransformerSizes, check_count

DIMENSIONS = ("tensor", "context", "pipeline", "data")

_WORKING_BYTES = 2  # of an activation, of a parameter that is computed with: bfloat16
_GRADIENT_BYTES = 4
_ADAM_BYTES = 12  # parameter, momentum and variance in float32, sharded


@dataclass(frozen=True)
class Traffic:
    """What one dimension sends in one step."""

    dimension: str
    ranks: tuple[int, ...]  # of the slowest group; where all are alike, rank 0's
    link: str
    sent_bytes: float  # by each GPU
    sending_s: float
    exposed_s: float  # of that, what nothing is computed beside


@dataclass(frozen=True)
class MeshStep:
    """One training step on a mesh, as each of its GPUs sees it."""

    traffic: tuple[Traffic, ...]  # the dimension whose ranks are neighbors first
    compute_s: float
    bubble_s: float
    held_bytes: float  # parameters, gradients and optimizer state; no activations

    @property
    def seconds(self) -> float:
        return self.compute_s + self.bubble_s + sum(each.exposed_s for each in self.traffic)

    def of(self, dimension: str) -> Traffic:
        return next(each for each in self.traffic if each.dimension == dimension)


def step(
    sizes: Mapping[str, int], model: TransformerSizes, sequences: int, cost: CostModel
) -> MeshStep:
    """One training step of ``sequences`` sequences, each of ``model.sequence`` tokens, on a mesh.

    sizes: of each of ``DIMENSIONS``, the one whose ranks are neighbors first. cost: what the GPUs
    and their links can do, and how many of them a host has. ValueError for sizes that do not divide.
    """
    _check(sizes, model, sequences)
    work = _Work(sizes, model, sequences, cost)
    traffic = {
        "tensor": work.tensor(),
        "context": work.context(),
        "pipeline": work.pipeline(),
        "data": work.data(),
    }
    exposed_s = traffic["tensor"].exposed_s + traffic["context"].exposed_s
    computed_s = work.micro_batches * (work.forward_s + work.backward_s)
    micro_batch_s = (computed_s + exposed_s) / work.micro_batches
    return MeshStep(
        tuple(traffic[name] for name in sizes),
        computed_s,
        (sizes["pipeline"] - 1) * micro_batch_s,
        work.held_bytes,
    )


class _Work:
    """What each GPU has to do, and what it sends."""

    def __init__(
        self, sizes: Mapping[str, int], model: TransformerSizes, sequences: int, cost: CostModel
    ) -> None:
        self.sizes, self.model, self.cost = sizes, model, cost
        self.group = {name: slowest(groups(sizes, name), cost.gpus_per_host) for name in DIMENSIONS}
        # Ranks that hold the same parameters.
        self.holders = slowest(groups(sizes, "data", "context"), cost.gpus_per_host)
        self.micro_batches = sequences // sizes["data"]
        self.tokens = model.sequence // sizes["context"]  # of a micro-batch
        self.layers = model.layers // sizes["pipeline"]

        flop_per_s = cost.spec.tensor_flop_per_s * cost.arithmetic_share
        # Half of the scores lie behind the mask. Two products: with keys, and with values.
        attention_flop = 2 * model.sequence**2 * model.width / sizes["tensor"]
        products_flop = 2 * model.sequence * model.block_products / sizes["tensor"]
        self.forward_s = (
            self.layers * (attention_flop + products_flop) / sizes["context"] / flop_per_s
        )
        self.backward_s = 2 * self.forward_s
        # Of one layer: what a rank computes with one rank's keys and values.
        self.block_s = attention_flop / sizes["context"] ** 2 / flop_per_s

        self.hidden_bytes = self.tokens * model.width * _WORKING_BYTES
        self.parameters = model.parameters / sizes["tensor"] / sizes["pipeline"]

    @property
    def held_bytes(self) -> float:
        sharded = _ADAM_BYTES / len(self.holders)
        return self.parameters * (_WORKING_BYTES + _GRADIENT_BYTES + sharded)

    def tensor(self) -> Traffic:
        ranks, times = self.group["tensor"], 4 * self.layers * self.micro_batches
        each_s = self.cost.group_time_s("all_reduce", self.hidden_bytes, ranks)
        sent_bytes = table.sent_bytes("all_reduce", self.hidden_bytes, len(ranks))
        return self._traffic("tensor", ranks, times * sent_bytes, times * each_s, times * each_s)

    def context(self) -> Traffic:
        ranks, times = self.group["context"], self.layers * self.micro_batches
        moving = (
            2 * self.tokens * self.model.key_value_width / self.sizes["tensor"]
        )  # numbers: keys and values
        ring = list(zip(ranks, ranks[1:] + ranks[:1], strict=True))
        if len(ranks) == 1:
            ring, times = [], 0
        with_gradients = moving * (_WORKING_BYTES + _GRADIENT_BYTES)
        hops = [  # forward: n - 1 hops; backward: n, until the gradients are home
            (times * (len(ranks) - 1), moving * _WORKING_BYTES, self.block_s),
            (times * len(ranks), with_gradients, 2 * self.block_s),
        ]
        return self._hops("context", ranks, ring, hops)

    def pipeline(self) -> Traffic:
        ranks = self.group["pipeline"]
        exposed = 2 * (len(ranks) - 1)  # they fill and drain the pipeline
        times = 2 * self.micro_batches if exposed else 0  # sent by each GPU but those at the ends
        hops = [
            (exposed, self.hidden_bytes, 0.0),
            (max(times - exposed, 0), self.hidden_bytes, self.forward_s),
        ]
        traffic = self._hops("pipeline", ranks, list(itertools.pairwise(ranks)), hops)
        return replace(traffic, sent_bytes=times * self.hidden_bytes)

    def data(self) -> Traffic:
        ranks = self.holders
        gathered_bytes = self.parameters * _WORKING_BYTES
        reduced_bytes = self.parameters * _GRADIENT_BYTES
        gather_s = self.cost.group_time_s("all_gather", gathered_bytes, ranks)
        reduce_s = self.cost.group_time_s("reduce_scatter", reduced_bytes, ranks)
        sent_bytes = table.sent_bytes("all_gather", gathered_bytes, len(ranks))
        sent_bytes += table.sent_bytes("reduce_scatter", reduced_bytes, len(ranks))
        exposed_s = max(gather_s - self.forward_s, 0) + max(reduce_s - self.backward_s, 0)
        return self._traffic("data", ranks, sent_bytes, gather_s + reduce_s, exposed_s)

    def _hops(
        self,
        name: str,
        ranks: list[int],
        pairs: list[tuple[int, int]],
        hops: Sequence[tuple[int, float, float]],
    ) -> Traffic:
        """Messages between neighbors, as slow as the slowest pair.

        hops: how many, of how many bytes, beside how many seconds of arithmetic.
        """
        sent_bytes = sending_s = exposed_s = 0.0
        for times, size_bytes, beside_s in hops:
            slowest = (self.cost.group_time_s("send", size_bytes, pair) for pair in pairs)
            each_s = max(slowest, default=0.0)
            sent_bytes += times * size_bytes
            sending_s += times * each_s
            exposed_s += times * max(each_s - beside_s, 0)
        return self._traffic(name, ranks, sent_bytes, sending_s, exposed_s)

    def _traffic(
        self, name: str, ranks: list[int], sent_bytes: float, sending_s: float, exposed_s: float
    ) -> Traffic:
        link = self.cost.link_name(ranks) if len(ranks) > 1 else "none"
        return Traffic(name, tuple(ranks), link, sent_bytes, sending_s, exposed_s)


def _check(sizes: Mapping[str, int], model: TransformerSizes, sequences: int) -> None:
    if sorted(sizes) != sorted(DIMENSIONS) or min(sizes.values()) < 1:
        raise ValueError(
            f"sizes must name each of {', '.join(DIMENSIONS)} with at least 1, got {dict(sizes)}"
        )
    check_count("sequences", sequences)
    divided = {
        "tensor": (model.key_value_heads, "key-value heads"),
        "context": (model.sequence, "tokens of a sequence"),
        "pipeline": (model.layers, "layers"),
        "data": (sequences, "sequences"),
    }
    for name, (count, what) in divided.items():
        if count % sizes[name]:
            raise ValueError(f"{count} {what} do not divide by {name} = {sizes[name]}")


# Who is in a group with whom, and where it lies on hosts


def groups(sizes: Mapping[str, int], *dimensions: str) -> list[list[int]]:
    """The groups of one dimension, or of several together, each a list of ranks.

    sizes: of each dimension, the one whose ranks are neighbors first; ``DeviceMesh`` names that one
    last. ValueError for a dimension that the mesh does not have.
    """
    for dimension in dimensions:
        if dimension not in sizes:
            raise ValueError(f"no dimension {dimension!r} in a mesh of {', '.join(sizes)}")
    names = list(sizes)
    strides = [
        (math.prod(sizes[name] for name in names[: names.index(dimension)]), sizes[dimension])
        for dimension in dimensions
    ]
    members: dict[int, list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        first = rank - sum(rank // stride % count * stride for stride, count in strides)
        members.setdefault(first, []).append(rank)
    return list(members.values())


def placement(ranks: Iterable[int], gpus_per_host: int) -> tuple[int, ...]:
    """How many of these ranks each of their hosts has, the fewest first; 0 per host means all."""
    return tuple(
        sorted(Counter(r // gpus_per_host if gpus_per_host else 0 for r in ranks).values())
    )


def slowness(placed: Sequence[int]) -> tuple[int, int, int]:
    """Orders the placements of groups of one size, the slowest last.

    The host with the fewest of its GPUs has the fewest adapters for the group, and holds up its ring;
    a group inside one host comes before all others. Then more hosts take more steps.
    """
    return -placed[0], len(placed), placed[-1]


def slowest(several: list[list[int]], gpus_per_host: int) -> list[int]:
    """The group of one dimension for which others wait; where all are alike, the first."""
    return max(several, key=lambda group: slowness(placement(group, gpus_per_host)))
