"""Who is in a group with whom on a mesh, and which group is spread worst over hosts."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def groups(sizes: Mapping[str, int], *dimensions: str) -> list[list[int]]:
    """The groups of one dimension, or of several together, each a list of ranks.

    sizes: of each dimension, the one whose ranks are neighbours first; ``DeviceMesh`` names that one
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
    found: dict[int, list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        first = rank - sum(rank // stride % count * stride for stride, count in strides)
        found.setdefault(first, []).append(rank)
    return list(found.values())


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
