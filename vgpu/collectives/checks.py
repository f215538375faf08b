"""What no collective can do with its arguments: refused alike among real ranks and in a cluster.

With NCCL's errors where it looks (ProcessGroupNCCL.cpp, c10d/Utils.hpp). Where it does not, it would
read or write beyond a tensor's end, or the numbers between those of a tensor that is not contiguous.
Functional collectives make their results, and copy what is not contiguous.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from vgpu.collectives.call import Call
from vgpu.tensor.tensor import VirtualTensor


def check(call: Call) -> None:
    """ValueError, TypeError or RuntimeError for what the collective cannot do."""
    _check_ranks(call)
    for key in _READ_AS_ROWS.get(call.operator, ()):
        _check_contiguous(_flat(call.named[key]))
    if call.operator in _CHECKS:
        _CHECKS[call.operator](call)


def _check_ranks(call: Call) -> None:
    count = call.group.size()
    src = call.named.get("src", 0) if call.name == "broadcast" else 0
    root = call.named.get("root_rank", src)
    peers = call.named.get("peer_list", [0 if call.peer is None else call.peer])
    for what, rank in (("root", root), *(("peer", peer) for peer in peers)):
        if not 0 <= rank < count:
            raise ValueError(
                f"{call.name}: invalid {what} rank: {rank}; the group's are 0 to {count - 1}"
            )


# NCCL does not look at all of them: it garbles those of gather and scatter, and of a reduce_scatter.
_BOTH, _BOTH_LISTS = ("output_tensor", "input_tensor"), ("output_tensors", "input_tensors")
_READ_AS_ROWS = {
    **dict.fromkeys(("c10d::allreduce_", "c10d::broadcast_", "c10d::reduce_"), ("tensors",)),
    **dict.fromkeys(("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"), _BOTH),
    **dict.fromkeys(("c10d::gather_", "c10d::scatter_", "c10d::alltoall_"), _BOTH_LISTS),
    "c10d::allgather_into_tensor_coalesced_": ("outputs", "inputs"),
    "c10d::reduce_scatter_tensor_coalesced_": ("outputs", "inputs"),
    "c10d::alltoall_base_": ("output", "input"),
    # The others of these are copied, to or from one that is contiguous.
    "c10d::allgather_": ("input_tensors",),
    "c10d::reduce_scatter_": ("output_tensors",),
}


def _check_contiguous(tensors: Iterable[torch.Tensor]) -> None:
    """NCCL reads a tensor as a row of numbers; channels-last is one, too."""
    for tensor in tensors:
        if not isinstance(tensor, VirtualTensor) or tensor.layout is not torch.strided:
            continue
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
        if not (
            tensor.is_contiguous()
            or (channels_last and tensor.is_contiguous(memory_format=channels_last))
        ):
            raise ValueError("Tensors must be contiguous")


def _large_and_small(call: Call) -> None:
    """One tensor has the parts of all ranks behind one another."""
    gathers, count = call.name == "all_gather", call.group.size()
    for given, received in zip(call.given, call.received, strict=True):
        if given.dtype != received.dtype:
            raise TypeError(
                f"{call.name}: output tensor must have the same type as input tensor, got "
                f"{received.dtype} and {given.dtype}"
            )
        small, large = (given, received) if gathers else (received, given)
        if small.numel() * count != large.numel():
            raise ValueError(
                f"{call.name} among {count} ranks gets {given.numel()} elements and has room for "
                f"{received.numel()}: one of them must be {count} times the other"
            )


def _list_of_parts(call: Call) -> None:
    """A list has one part for each rank, of unequal sizes if they like; this rank's own is alone."""
    rank = call.group.rank()
    if call.name == "all_gather":
        _check_length(call, call.received)
        _check_own_part(call, call.given[0].numel(), call.received[rank].numel())
        if len({part.shape for part in call.received}) > 1:  # broadcast one by one, not copied
            _check_contiguous(call.received)
    else:
        _check_length(call, call.given)
        _check_own_part(call, call.given[rank].numel(), call.received[0].numel())


def _lists_of_parts(call: Call) -> None:
    for parts in (call.given, call.received):
        _check_length(call, parts)
    rank = call.group.rank()
    _check_own_part(call, call.given[rank].numel(), call.received[rank].numel())


def _of_root(call: Call) -> None:
    """The root has a list of parts, which are all alike."""
    if call.group.rank() != call.named["root_rank"]:
        return
    parts, (own,) = (
        (call.received, call.given) if call.name == "gather" else (call.given, call.received)
    )
    _check_length(call, parts)
    for index, part in enumerate(parts):
        if part.shape != own.shape:
            raise ValueError(
                f"{call.name}: invalid tensor size at index {index} (expected {list(own.shape)}, "
                f"got {list(part.shape)})"
            )


def _splits(call: Call) -> None:
    (given,), received = call.given, call.received
    count, rank = call.group.size(), call.group.rank()
    sizes = call.named["input_split_sizes"], call.named["output_split_sizes"]
    own = []
    for split, tensor in zip(sizes, (given, *received), strict=False):  # a functional one makes it
        _check_split_sizes(split, tensor, count)
        rows = tensor.shape[0]
        own.append((split[rank] if split else rows // count) * (tensor.numel() // max(rows, 1)))
    if len(own) == 2:
        _check_own_part(call, *own)


def _check_split_sizes(split: Sequence[int], tensor: torch.Tensor, count: int) -> None:
    """RuntimeError in the words of c10d/Utils.hpp."""
    rows = tensor.shape[0]
    if any(size < 0 for size in split):
        raise RuntimeError("Split sizes must be non-negative")
    if not split and rows % count:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
    if split and len(split) != count:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if split and sum(split) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def _check_length(call: Call, parts: Sequence[torch.Tensor]) -> None:
    count = call.group.size()
    if len(parts) != count:
        raise ValueError(
            f"{call.name} among {count} ranks got a list of {len(parts)} tensors: it takes one for "
            "each rank"
        )


def _check_own_part(call: Call, given: int, received: int) -> None:
    if given != received:
        raise ValueError(
            f"{call.name}: rank {call.group.rank()} of the group has {given} elements for itself "
            f"and room for {received}"
        )


_CHECKS: dict[str, Callable[[Call], None]] = {
    "c10d::_allgather_base_": _large_and_small,
    "c10d::_reduce_scatter_base_": _large_and_small,
    "c10d::allgather_into_tensor_coalesced_": _large_and_small,
    "c10d::reduce_scatter_tensor_coalesced_": _large_and_small,
    "c10d::allgather_": _list_of_parts,
    "c10d::reduce_scatter_": _list_of_parts,
    "c10d::alltoall_": _lists_of_parts,
    "c10d::gather_": _of_root,
    "c10d::scatter_": _of_root,
    "c10d::alltoall_base_": _splits,
    "_c10d_functional::all_to_all_single": _splits,
}


def _flat(value: torch.Tensor | Sequence[object]) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return chain.from_iterable(_flat(part) for part in value)  # type: ignore[arg-type]
