"""How a training run is divided over ranks: degrees of parallelism, stages, and the slowest rank.

The degrees have torchtitan's names: ``pp``, ``dp_replicate``, ``dp_shard`` and ``tp``.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vgpu.plan.meshes import groups, placement, slowness
from vgpu.plan.transformer import TransformerSizes, check_count


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of ranks.

    Neighboring ranks are those of ``tp``, which send most often; then come ``dp_shard``,
    ``dp_replicate`` and ``pp``.
    """

    dp_replicate: int = 1
    """Groups of ranks that hold the same parameters and compute on samples of their own."""
    dp_shard: int = 1
    """Ranks among which FSDP2 shards parameters, gradients and optimizer state."""
    tp: int = 1
    """Ranks that compute each layer together (tensor and sequence parallelism)."""
    pp: int = 1
    """Pipeline stages: groups of ranks with consecutive layers each."""

    def __post_init__(self) -> None:
        for name, degree in vars(self).items():
            check_count(name, degree)

    @property
    def ranks(self) -> int:
        return self.ranks_per_stage * self.pp

    @property
    def ranks_per_stage(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Parts into which a batch is divided; ranks of ``tp`` see the same samples."""
        return self.dp_replicate * self.dp_shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks of the default process group, with a dimension for each degree but ``pp`` of 1."""
        degrees = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        if self.pp > 1:
            degrees = {"pp": self.pp} | degrees
        return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))

    def __str__(self) -> str:
        """Such as "dp_shard 8 × tp 8"."""
        degrees = {"pp": self.pp} | vars(self)
        shown = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " × ".join(shown) or "1 rank"


def check_tp(sizes: TransformerSizes, tp: int, sequence: int | None = None) -> None:
    """ValueError if a layer of these sizes cannot be shared evenly by ``tp`` ranks."""
    divided = {
        "heads": sizes.heads,
        "key-value heads": sizes.key_value_heads,
        "feed-forward width": sizes.feed_forward,
        "vocabulary": sizes.vocabulary,
        "sequence": sequence or sizes.sequence,
    }
    uneven = [f"{name} {size}" for name, size in divided.items() if size % tp]
    if uneven:
        largest = math.gcd(*divided.values())
        raise ValueError(
            f"{tp} ranks cannot share a layer evenly: {', '.join(uneven)}; all of them divide by "
            f"{largest}"
        )


# Pipeline stages


class StageLayers(NamedTuple):
    """What a pipeline stage has of a transformer."""

    layers: int
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the last norm and the output."""


def split_layers(layers: int, stages: int) -> list[StageLayers]:
    """The stages of a transformer of so many layers, as torchtitan cuts it.

    The embedding and the output count as a layer each, and what is left over goes to the stages in
    front. So Llama 405B, whose 126 layers do not divide by 8, has 15 layers in its first and last of
    8 stages and 16 in the others. ValueError for more stages than layers.

    Source: ``_generate_llm_fqn_per_model_part`` in torchtitan/distributed/pipeline_parallel.py; the
    version of December 2024, ``generate_split_points``, gives the same stages there.
    """
    if stages > layers:
        raise ValueError(
            f"{stages} stages of a pipeline are too many for a model of {layers} layers: at most "
            f"{layers}"
        )
    if stages == 1:
        return [StageLayers(layers, True, True)]
    each, left = divmod(layers + 2, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return [StageLayers(n, stage == 0, stage == stages - 1) for stage, n in enumerate(counts)]


# The rank that is recorded


class SlowestRank(NamedTuple):
    """A rank, and how its groups lie on hosts."""

    rank: int
    placements: tuple[tuple[int, ...], ...]
    """Of its groups of tp, dp_shard and dp_replicate: how many ranks on each host, fewest first."""


@functools.lru_cache(4096)
def slowest_rank(layout: Layout, gpus_per_host: int, stage: int = 0) -> SlowestRank:
    """The rank of a stage that all others wait for; of several, one with the largest shards.

    Where the size of a group and the GPUs of a host do not divide one another, some groups of a kind
    lie inside a host and others span two. Ranks wait for one another in all their groups, so a step
    takes as long as that of a rank whose groups are the slowest of their kinds.

    ValueError where no rank has the slowest groups of all kinds: ranks then hold up one another by
    turns, and none of them shows the step.
    """
    first = stage * layout.ranks_per_stage
    sizes = {"tp": layout.tp, "dp_shard": layout.dp_shard, "dp_replicate": layout.dp_replicate}
    placements: list[list[tuple[int, ...]]] = [[] for _ in range(layout.ranks_per_stage)]
    for name in sizes:
        for group in groups(sizes, name):
            placed = placement((first + rank for rank in group), gpus_per_host)
            for rank in group:
                placements[rank].append(placed)
    speeds = [tuple(map(slowness, placed)) for placed in placements]
    worst = tuple(map(max, zip(*speeds, strict=True)))
    if worst not in speeds:
        raise ValueError(
            f"hosts of {gpus_per_host} GPUs cut groups of {layout} in such a way that no rank of "
            f"stage {stage} has the slowest ones of tp, dp_shard and dp_replicate together, and no "
            f"one rank shows how long a step takes; let tp ({layout.tp}) divide {gpus_per_host}"
        )
    # Of uneven shards the first are the largest.
    index = min(
        (rank for rank, speed in enumerate(speeds) if speed == worst),
        key=lambda rank: rank // layout.tp % layout.dp_shard,
    )
    return SlowestRank(first + index, tuple(placements[index]))
