"""Seconds of each collective, by its name in ``torch.distributed``: one table.

Every formula is the usual one of a latency for each step and a bandwidth for the bytes (Hockney,
1994), with the algorithm that NCCL uses for large messages: rings. Left out: NCCL's trees and its
faster protocols for small messages, reductions inside NVSwitch, and the time to add.

Sizes are those of nccl-tests (doc/PERFORMANCE.md): of the whole tensor, which for ``all_gather`` is
the gathered one, for ``reduce_scatter`` the one before it is scattered, and for ``all_to_all`` what
one GPU holds.
"""

from collections.abc import Callable
from typing import NamedTuple


class Way(NamedTuple):
    """What a GPU has to send with."""

    latency_s: float
    bytes_per_s: float


class Collective(NamedTuple):
    """The cost of one collective, and where its formula comes from."""

    seconds: Callable[[float, int, Way], float]  # of bytes, the number of GPUs, and the way
    source: str


def _all_reduce(size_bytes: float, count: int, way: Way) -> float:
    return _all_gather(size_bytes, count, way) + _reduce_scatter(size_bytes, count, way)


def _all_gather(size_bytes: float, count: int, way: Way) -> float:
    """n - 1 steps around a ring, in each of which every GPU sends 1/n of the bytes."""
    return (count - 1) * (way.latency_s + size_bytes / count / way.bytes_per_s)


_reduce_scatter = _all_gather  # the same steps, with a sum in each


def _broadcast(size_bytes: float, count: int, way: Way) -> float:
    """Small parts pass from GPU to GPU, so that all links are busy at once.

    The bytes take as long as over one link, and each of the n - 1 hops adds its latency.
    """
    return (count - 1) * way.latency_s + size_bytes / way.bytes_per_s


_reduce = _broadcast  # the same chain in the other direction, with a sum at each hop


def _all_to_all(size_bytes: float, count: int, way: Way) -> float:
    """Every GPU sends 1/n of its bytes to each other one, to all of them at once."""
    return way.latency_s + (count - 1) / count * size_bytes / way.bytes_per_s


def _send(size_bytes: float, count: int, way: Way) -> float:
    return way.latency_s + size_bytes / way.bytes_per_s


_RINGS = "Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms"
_CHAINS = (
    "Chan et al., 2007, Collective communication: theory, practice, and experience (pipelined)"
)
_POINT_TO_POINT = "NCCL user guide, point-to-point communication: grouped sends and receives"

COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(_all_reduce, f"{_RINGS}: a reduce-scatter, then an all-gather"),
    "reduce_scatter": Collective(_reduce_scatter, _RINGS),
    "all_gather": Collective(_all_gather, _RINGS),
    "broadcast": Collective(_broadcast, _CHAINS),
    "reduce": Collective(_reduce, _CHAINS),
    "all_to_all": Collective(_all_to_all, _POINT_TO_POINT),
    "send": Collective(_send, _POINT_TO_POINT),
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
