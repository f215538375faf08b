"""One collective, as the arguments of its operator say it."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vgpu.collectives import ddp
from vgpu.tensor.operators import Args, Kwargs, Operator, named_arguments, tensors_in
from vgpu.time.backward import in_backward

Tensors = list[torch.Tensor]

_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_into_tensor": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather_into_tensor": "gather",
    "recv_any_source": "recv",
    "isend": "send",
    "irecv": "recv",
}


def plain_name(func: Operator) -> str:
    """The name that torch.distributed gives a collective, whichever operator runs it."""
    bare = func._schema.name.partition("::")[2]
    bare = bare.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    return _NAMES.get(bare, bare)


class Call:
    """One collective: its group, and what this rank gives and receives."""

    def __init__(
        self, func: Operator, args: Args, kwargs: Kwargs, made: Iterable[torch.Tensor] = ()
    ):
        """made: the results that are new tensors."""
        self.operator = func._schema.name
        self.name = plain_name(func)
        self.named = named_arguments(func, args, kwargs)
        self.group = _group_of(self.named)
        in_place = self.operator.endswith("_")
        self.given, self.received = _given_and_received(self.name, self.named, in_place)
        self.made = list(made)
        # Among the group's ranks; for a message, the one at its other end.
        self.peer: int | None = None
        if self.name in ("send", "recv"):
            self.peer = self.named.get("dst", self.named.get("src"))

    @property
    def is_for_ddp(self) -> bool:
        """Whether DistributedDataParallel adds up gradients with it."""
        return in_backward() and self.group in ddp.process_groups

    @property
    def given_bytes(self) -> int:
        return _bytes(self.given)

    @property
    def size_bytes(self) -> int:
        """As ``timing.collectives`` counts: of the whole tensor."""
        given, received = _bytes(self.given), _bytes([*self.received, *self.made])
        if self.name in ("all_gather", "recv"):
            return received
        if self.name == "gather":
            return given * self.group.size()
        if self.name == "scatter":
            return received * self.group.size()
        return given

    @property
    def group_name(self) -> str:
        return str(self.group.group_name)

    @property
    def ranks(self) -> list[int]:
        """The global ranks that take part."""
        ranks = dist.get_process_group_ranks(self.group)
        return ranks if self.peer is None else [dist.get_rank(), ranks[self.peer]]


_GIVEN = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
_RECEIVED = ("output_tensors", "output_tensor", "output_lists", "outputs", "output", "out")


def _given_and_received(
    name: str, named: dict[str, Any], in_place: bool
) -> tuple[Tensors, Tensors]:
    given = [tensor for key in _GIVEN if key in named for tensor in tensors_in(named[key])]
    received = [tensor for key in _RECEIVED if key in named for tensor in tensors_in(named[key])]
    if name == "recv":
        return [], given
    if in_place and name in ("all_reduce", "broadcast", "reduce"):
        return given, given
    return given, received


def _group_of(named: dict[str, Any]) -> dist.ProcessGroup:
    group: Any = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
