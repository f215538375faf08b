"""How ranks share a transformer: degrees of parallelism, their groups and hosts, pipeline stages.

The degrees have torchtitan's names: ``pp``, ``dp_replicate``, ``dp_shard``, ``cp`` and ``tp``.
parallel_model.py has the PyTorch code for each of them.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vgpu.plan.transformer import TransformerSizes
from vgpu.time.costs import check_count

RECOMPUTE = ("none", "selective", "full")
"""What backward recomputes in a block: nothing, everything but attention and every second matmul
(torchtitan's "selective op"), or everything (full activation checkpointing).
"""

REDUCE = ("float32", "bfloat16")
"""The dtypes in which gradients can be reduced across ranks."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of ranks.

    The ``tp`` ranks, which communicate most often, are neighbors; then come ``cp``, ``dp_shard``,
    ``dp_replicate`` and ``pp``.
    """

    dp_replicate: int = 1
    """Groups of ranks that hold the same parameters and compute on different samples."""
    dp_shard: int = 1
    """Ranks across which FSDP2 shards parameters, gradients and optimizer state."""
    tp: int = 1
    """Ranks that compute each layer together (tensor and sequence parallelism)."""
    pp: int = 1
    """Groups of ranks, each with its own pipeline stage, or stages if there are chunks."""
    cp: int = 1
    """Ranks that share each sequence (context parallelism); FSDP2 shards across them, too."""
    ep: int = 1
    """Neighboring ``dp_shard`` and ``cp`` ranks that hold different experts; adds no ranks."""

    def __post_init__(self) -> None:
        for name, degree in vars(self).items():
            check_count(name, degree)
        if self.shards % self.ep:
            raise ValueError(f"ep = {self.ep} must divide dp_shard × cp = {self.shards}")
        if self.ep > 1 and self.tp > 1:
            raise ValueError(
                "experts aren't supported with tensor parallelism: set ep or tp, not both"
            )

    @property
    def ranks(self) -> int:
        return self.ranks_per_stage * self.pp

    @property
    def ranks_per_stage(self) -> int:
        return self.dp_replicate * self.shards * self.tp

    @property
    def shards(self) -> int:
        """The number of ranks across which parameters are sharded: ``dp_shard`` times ``cp``."""
        return self.dp_shard * self.cp

    @property
    def dp(self) -> int:
        """The number of parts of a batch; ``tp`` and ``cp`` ranks work on the same part."""
        return self.dp_replicate * self.dp_shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh of all ranks, with dimensions ``dp_replicate``, ``dp_shard`` and ``tp``.

        If ``pp`` is above 1, it comes first. ``cp`` is part of ``dp_shard``, because FSDP2 shards
        across both.
        """
        return self._mesh(device_type, {"dp_shard": self.shards, "tp": self.tp})

    def context_mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh of the ranks that share sequences with this one."""
        degrees = {"dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        return self._mesh(device_type, degrees)["cp"]

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh for experts: only ranks that differ in ``ep`` have different experts."""
        return self._mesh(device_type, {"dp_shard": self.shards // self.ep, "ep": self.ep})

    def _mesh(self, device_type: str, of_replica: dict[str, int]) -> DeviceMesh:
        degrees = {"dp_replicate": self.dp_replicate} | of_replica
        if self.pp > 1:
            degrees = {"pp": self.pp} | degrees
        return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))

    def __str__(self) -> str:
        """Return, for example, "dp_shard 8 × tp 8"."""
        degrees = {"pp": self.pp} | vars(self)
        shown = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " × ".join(shown) or "1 rank"


def check_tp(sizes: TransformerSizes, tp: int, sequence: int | None = None) -> None:
    """Raise ValueError if ``tp`` ranks can't share a layer of these sizes evenly."""
    if tp > 1 and sizes.latent is not None:
        raise ValueError(
            "latent attention isn't supported with tensor parallelism: use dp_shard or cp instead "
            "of tp"
        )
    divided = {
        "heads": sizes.heads,
        "key-value heads": sizes.key_value_heads,
        "feed-forward width": sizes.feed_forward,
        "vocabulary": sizes.vocabulary,
        "sequence": sequence or sizes.sequence,
    }
    uneven = [f"{name}: {size}" for name, size in divided.items() if size % tp]
    if uneven:
        largest = math.gcd(*divided.values())
        raise ValueError(
            f"{tp} ranks can't share a layer evenly ({', '.join(uneven)}); tp must divide {largest}"
        )


# Groups of ranks, and the hosts they're on


def groups(sizes: Mapping[str, int], *dimensions: str) -> list[list[int]]:
    """Return the groups along one dimension, or several combined, each as a list of ranks.

    ``sizes`` has the size of each dimension, starting with the one whose ranks are neighbors, which
    is the last in ``DeviceMesh``.
    """
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
    """Count the ranks on each of their hosts, fewest first; 0 GPUs per host means a single host."""
    return tuple(
        sorted(Counter(r // gpus_per_host if gpus_per_host else 0 for r in ranks).values())
    )


@functools.cache
def check_hosts(layout: Layout, gpus_per_host: int) -> None:
    """Raise ValueError if groups of the same kind are placed differently on hosts.

    Some groups would be slower than others, and no single rank would show how long a step takes.
    """
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp_shard": layout.dp_shard}
    sizes |= {"dp_replicate": layout.dp_replicate, "pp": layout.pp}
    kinds = {name: groups(sizes, name) for name in ("tp", "cp", "dp_replicate")}
    kinds["dp_shard"] = groups(sizes, "cp", "dp_shard")
    if layout.ep > 1:
        parts = {"ep": layout.ep, "dp_shard": layout.shards // layout.ep}
        parts["others"] = layout.dp_replicate * layout.pp
        kinds["ep"] = groups(parts, "ep")
        kinds["the experts' dp_shard"] = groups(parts, "dp_shard")
    for name, several in kinds.items():
        ways = sorted({placement(group, gpus_per_host) for group in several})
        if len(ways) > 1:
            raise ValueError(
                f"{layout} places {name} groups differently: one has {ways[0]} ranks on its hosts "
                f"of {gpus_per_host} GPUs, another {ways[-1]}. Choose degrees that divide "
                f"{gpus_per_host} or are multiples of it"
            )


# Pipeline stages


class StageLayers(NamedTuple):
    """The part of a transformer that a pipeline stage has."""

    layers: int
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the final norm and the output."""


def split_layers(layers: int, stages: int) -> list[StageLayers]:
    """Return the stages of a transformer with ``layers`` layers, divided as in torchtitan.

    The embedding and the output each count as a layer, and the first stages get one more layer if
    there's a remainder. For example, Llama 405B has 126 layers: in 8 stages, the first and the last
    have 15 layers, and the others 16. Raises ValueError for more stages than layers.

    Source: ``_generate_llm_fqn_per_model_part`` in torchtitan/distributed/pipeline_parallel.py;
    ``generate_split_points``, in the version of December 2024, gives that model the same stages.
    """
    if stages > layers:
        raise ValueError(
            f"{stages} pipeline stages are too many for a model with {layers} layers: use at most "
            f"{layers}"
        )
    if stages == 1:
        return [StageLayers(layers, True, True)]
    each, left = divmod(layers + 2, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return [StageLayers(n, stage == 0, stage == stages - 1) for stage, n in enumerate(counts)]
