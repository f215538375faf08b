"""Seconds of each collective, by its name in ``torch.distributed``: one table.

Every formula is the usual one of a latency for each step and a bandwidth for the bytes (Hockney,
1994), with the algorithms that NCCL uses for large messages: rings, and trees for an all-reduce over
several hosts. Left out: NCCL's faster protocols for small messages, reductions inside NVSwitch and
in switches between hosts, and the time to add.

Between hosts a ring enters and leaves each host once for every adapter, so that a group with more
GPUs on a host has more adapters. All GPUs of a host are taken to send at once: each has its part.
Where hosts have unequally many, the one with the fewest holds up the ring, and its GPUs have the
most to send to other hosts.

Sizes are those of nccl-tests (doc/PERFORMANCE.md): of the whole tensor, which for ``all_gather`` is
the gathered one, for ``reduce_scatter`` the one before it is scattered, and for ``all_to_all`` what
one GPU holds; of a ``permute``, what each GPU sends.
"""

import math
from collections.abc import Callable
from typing import NamedTuple


class Way(NamedTuple):
    """What a GPU has to send with, inside its host and to others."""

    latency_s: float
    bytes_per_s: float
    hosts: int = 1  # over which the group is spread
    fewest: int = 1  # of its GPUs, on one of several hosts
    most: int = 1
    network_latency_s: float = 0.0
    network_bytes_per_s: float = math.inf  # a GPU's part of its host's adapters

    @property
    def ring_bytes_per_s(self) -> float:
        """What passes through each point of a ring of the group's GPUs, over all its channels."""
        if self.hosts == 1:
            return self.bytes_per_s
        between = self.fewest * self.network_bytes_per_s
        return between if self.most == 1 else min(self.bytes_per_s, between)

    def steps_s(self, count: int) -> float:
        """The latencies of once around a ring of ``count`` GPUs."""
        between = self.hosts - 1
        return (count - 1 - between) * self.latency_s + between * self.network_latency_s


class Collective(NamedTuple):
    """The cost of one collective, and where its formula comes from."""

    seconds: Callable[[float, int, Way], float]  # of bytes, the number of GPUs, and the way
    source: str


def _all_reduce(size_bytes: float, count: int, way: Way) -> float:
    ring_s = _all_gather(size_bytes, count, way) + _reduce_scatter(size_bytes, count, way)
    return ring_s if way.hosts == 1 else min(ring_s, _tree(size_bytes, count, way))


def _tree(size_bytes: float, count: int, way: Way) -> float:
    """Sums go up a tree of hosts and come down again, a chain of GPUs inside each host.

    Its bytes pass twice, and 0.92 of a ring's bandwidth is NCCL's own estimate (tuning.cc).
    """
    inside, levels = way.most - 1, math.ceil(math.log2(way.hosts))
    steps_s = 2 * (inside * way.latency_s + levels * way.network_latency_s)
    return steps_s + 2 * size_bytes / (0.92 * way.ring_bytes_per_s)


def _all_gather(size_bytes: float, count: int, way: Way) -> float:
    """n - 1 steps around a ring, in each of which every GPU sends 1/n of the bytes."""
    passed_bytes = (count - 1) * size_bytes / count
    return way.steps_s(count) + passed_bytes / way.ring_bytes_per_s


_reduce_scatter = _all_gather  # the same steps, with a sum in each


def _broadcast(size_bytes: float, count: int, way: Way) -> float:
    """Small parts pass from GPU to GPU, so that all links are busy at once.

    The bytes take as long as over one link, and each of the n - 1 hops adds its latency.
    """
    return way.steps_s(count) + size_bytes / way.ring_bytes_per_s


_reduce = _broadcast  # the same chain in the other direction, with a sum at each hop


def _all_to_all(size_bytes: float, count: int, way: Way) -> float:
    """Every GPU sends 1/n of its bytes to each other one, to all of them at once."""
    most = count if way.hosts == 1 else way.most
    inside_s = way.latency_s + (most - 1) / count * size_bytes / way.bytes_per_s
    if way.hosts == 1:
        return inside_s
    between_s = (count - way.fewest) / count * size_bytes / way.network_bytes_per_s
    return max(inside_s, way.network_latency_s + between_s)


def _send(size_bytes: float, count: int, way: Way) -> float:
    if way.hosts > 1:
        return way.network_latency_s + size_bytes / way.network_bytes_per_s
    return way.latency_s + size_bytes / way.bytes_per_s


_RINGS = "Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms"
_CHAINS = (
    "Chan et al., 2007, Collective communication: theory, practice, and experience (pipelined)"
)
_POINT_TO_POINT = "NCCL user guide, point-to-point communication: grouped sends and receives"

COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        _all_reduce,
        f"{_RINGS}: a reduce-scatter, then an all-gather; over several hosts also a tree (Sanders et "
        "al., 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan), "
        "whichever is faster",
    ),
    "reduce_scatter": Collective(_reduce_scatter, _RINGS),
    "all_gather": Collective(_all_gather, _RINGS),
    "broadcast": Collective(_broadcast, _CHAINS),
    "reduce": Collective(_reduce, _CHAINS),
    "all_to_all": Collective(_all_to_all, _POINT_TO_POINT),
    "gather": Collective(_all_to_all, _POINT_TO_POINT),
    "scatter": Collective(_all_to_all, _POINT_TO_POINT),
    "send": Collective(_send, _POINT_TO_POINT),
    "recv": Collective(_send, _POINT_TO_POINT),
    "permute": Collective(_send, f"{_POINT_TO_POINT}: each GPU sends to one and receives from one"),
    "barrier": Collective(_all_reduce, "an all-reduce of one number"),
}


def seconds(name: str, size_bytes: float, count: int, way: Way) -> float:
    """Seconds of the collective ``name`` among ``count`` GPUs; 0 for a single one.

    ValueError names the collectives there are.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"no collective {name!r}; there are {', '.join(COLLECTIVES)}")
    if count < 1:
        raise ValueError(f"{name} among {count} GPUs: a collective needs at least one")
    return COLLECTIVES[name].seconds(size_bytes, count, way) if count > 1 else 0.0
