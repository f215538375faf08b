"""How many ranks share what of a transformer: stages, copies, shards and tensors."""

import math
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vgpu.plan.transformer import TransformerSizes, check_count

KINDS = ("ddp", "fsdp", "hsdp", "tp", "fsdp+tp")
"""The layouts that have a name."""


@dataclass(frozen=True)
class Layout:
    """Into how many parts each thing is divided; the product is the number of ranks.

    Neighbouring ranks share tensors, which are sent most often; then come shards, copies, stages.
    """

    replicas: int = 1
    """Groups that hold the same and compute on samples of their own."""
    shards: int = 1
    """Ranks among which FSDP2 divides parameters, gradients and optimizer state."""
    tensors: int = 1
    """Ranks that compute one layer together, and hold a part of each sequence between the layers."""
    stages: int = 1
    """Groups of ranks with consecutive layers each: a pipeline."""

    def __post_init__(self) -> None:
        for name, parts in vars(self).items():
            check_count(name, parts)

    @property
    def ranks(self) -> int:
        return self.ranks_of_a_stage * self.stages

    @property
    def ranks_of_a_stage(self) -> int:
        return self.replicas * self.shards * self.tensors

    @property
    def batches(self) -> int:
        """Parts into which a batch is divided; ranks that share tensors see the same samples."""
        return self.replicas * self.shards

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks of the default process group in replicas, shards and tensors.

        In a pipeline, ``stages`` is the dimension in front of them.
        """
        sizes = {"replicas": self.replicas, "shards": self.shards, "tensors": self.tensors}
        if self.stages > 1:
            sizes = {"stages": self.stages} | sizes
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def __str__(self) -> str:
        named = {"stages": self.stages} | vars(self)
        parts = [f"{parts} {name}" for name, parts in named.items() if parts > 1]
        return " × ".join(parts) or "1 rank"


def named_layout(kind: str, ranks: int, hosts: int = 1, tensors: int = 2) -> Layout:
    """The layout of one of ``KINDS`` on so many ranks.

    ``hosts`` decides how many copies "hsdp" holds, one a host but at least two; ``tensors`` how many
    ranks share a layer in "fsdp+tp". ValueError if the ranks cannot be divided so.
    """
    if kind == "ddp":
        return Layout(replicas=ranks)
    if kind == "fsdp":
        return Layout(shards=ranks)
    if kind == "tp":
        return Layout(tensors=ranks)
    if kind == "hsdp":
        copies = max(2, hosts)
        return Layout(replicas=copies, shards=_divided(ranks, copies, "copies of the model"))
    if kind == "fsdp+tp":
        return Layout(shards=_divided(ranks, tensors, "ranks that share a layer"), tensors=tensors)
    raise ValueError(f"unknown layout {kind!r}; choose from {', '.join(KINDS)}")


def _divided(ranks: int, parts: int, what: str) -> int:
    if ranks % parts:
        raise ValueError(
            f"{ranks} ranks cannot be divided into groups for {parts} {what}; start a multiple of "
            f"{parts} ranks"
        )
    return ranks // parts


def check_tensors(sizes: TransformerSizes, tensors: int, sequence: int | None = None) -> None:
    """ValueError if a layer of these sizes cannot be shared evenly by ``tensors`` ranks."""
    divided = {
        "heads": sizes.heads,
        "key-value heads": sizes.key_value_heads,
        "feed-forward width": sizes.feed_forward,
        "vocabulary": sizes.vocabulary,
        "sequence": sequence or sizes.sequence,
    }
    uneven = [f"{name} {size}" for name, size in divided.items() if size % tensors]
    if uneven:
        largest = math.gcd(*divided.values())
        raise ValueError(
            f"{tensors} ranks cannot share a layer evenly: {', '.join(uneven)}; all of them divide "
            f"by {largest}"
        )
