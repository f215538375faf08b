"""Which rank of a plan's cluster is recorded: the one that everybody waits for.

Where the size of a group and the GPUs of a host do not divide one another, some groups of a kind lie
inside a host and others span two. Ranks meet in all their groups, so a step takes as long as that of
a rank whose groups are the slowest of their kinds.
"""

import functools
from typing import NamedTuple

from vgpu.plan.meshes import groups, placement, slowness
from vgpu.plan.parallel import Layout


class Slowest(NamedTuple):
    """A rank, and how its groups lie on hosts."""

    rank: int
    placements: tuple[tuple[int, ...], ...]
    """Of those that share tensors, shards, and replicas: how many of each host, fewest first."""


@functools.lru_cache(4096)
def slowest_rank(layout: Layout, gpus_per_host: int, stage: int = 0) -> Slowest:
    """The rank of a stage whose groups are the slowest; of several, one with the first shards.

    ValueError where no rank has the slowest groups of all kinds: ranks then hold up one another by
    turns, and none of them shows the step.
    """
    first = stage * layout.ranks_of_a_stage
    sizes = {"tensors": layout.tensors, "shards": layout.shards, "replicas": layout.replicas}
    found: list[list[tuple[int, ...]]] = [[] for _ in range(layout.ranks_of_a_stage)]
    for name in sizes:
        for group in groups(sizes, name):
            placed = placement((first + rank for rank in group), gpus_per_host)
            for rank in group:
                found[rank].append(placed)
    speeds = [tuple(map(slowness, placed)) for placed in found]
    worst = tuple(map(max, zip(*speeds, strict=True)))
    if worst not in speeds:
        raise ValueError(
            f"hosts of {gpus_per_host} GPUs cut groups of {layout} in such a way that no rank of "
            f"stage {stage} has the slowest ones of tensors, shards and replicas together, and no "
            f"one rank shows how long a step takes; let tensors ({layout.tensors}) divide "
            f"{gpus_per_host}"
        )
    # Of uneven shards the first are the largest.
    index = min(
        (rank for rank, speed in enumerate(speeds) if speed == worst),
        key=lambda rank: rank // layout.tensors % layout.shards,
    )
    return Slowest(first + index, tuple(found[index]))
