"""One call of a collective, read from its operator's arguments, and the checks that may reject it.

Real ranks and a virtual cluster's ranks reject the same calls, with NCCL's errors for what NCCL
checks (ProcessGroupNCCL.cpp, c10d/Utils.hpp). They also reject calls that would make NCCL read or
write past the end of a tensor, or between the elements of a non-contiguous one. Functional
collectives need few checks, because they create their results and copy non-contiguous inputs.
table.py lists the checks for each operator.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vgpu.tensor.operators import Kwargs, tensors_in
from vgpu.tensor.tensor import VirtualTensor

Tensors = list[torch.Tensor]


class Call:
    """One collective: its group, and the tensors that this rank passes in and gets back."""

    def __init__(self, name: str, operator: str, arguments: Kwargs, group: dist.ProcessGroup):
        """``name`` is from torch.distributed, ``operator`` from torch.ops, with its namespace."""
        self.name = name
        self.operator = operator
        self.arguments = arguments
        self.group = group
        self.inputs = _tensors_of(arguments, _INPUTS)
        self.outputs = _tensors_of(arguments, _OUTPUTS)
        if operator.endswith("_") and arguments.keys().isdisjoint(_OUTPUTS):  # in place
            self.outputs = self.inputs
        self.made: Tensors = []
        """Outputs that the operator creates; empty until it has run."""
        self.size_bytes = 0
        """The size of the full tensor, as defined by nccl-tests; table.py sets it."""
        self.root: int | None = arguments.get("root_rank", arguments.get("src"))
        self.peer: int | None = None
        """The rank within the group at the other end of a message."""
        if name in ("send", "recv"):
            self.peer, self.root = arguments.get("dst", self.root), None
        if name == "recv":
            self.inputs, self.outputs = [], self.inputs

    @property
    def is_functional(self) -> bool:
        """Whether the operator returns tensors to wait for; other operators return a ``Work``."""
        return not self.operator.startswith("c10d::")

    @property
    def input_bytes(self) -> int:
        return size_bytes_of(self.inputs)

    @property
    def group_name(self) -> str:
        return str(self.group.group_name)

    @property
    def ranks(self) -> list[int]:
        """The participating ranks, as global ranks."""
        ranks = dist.get_process_group_ranks(self.group)
        return ranks if self.peer is None else [dist.get_rank(), ranks[self.peer]]


_INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
_OUTPUTS = ("output_tensors", "output_tensor", "output_lists", "outputs", "output", "out")


def _tensors_of(arguments: Kwargs, names: Iterable[str]) -> Tensors:
    return [tensor for name in names for tensor in tensors_in(arguments.get(name))]


def size_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def group_of(arguments: Kwargs) -> dist.ProcessGroup:
    """Return the process group in an operator's arguments: itself, boxed for C++, or by name."""
    group: Any = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


# Checks. Each raises ValueError, TypeError or RuntimeError.

Check = Callable[[Call], None]


def check_ranks(call: Call) -> None:
    """Raise ValueError for a root or a peer that isn't in the group."""
    count = call.group.size()
    for what, rank in (("root", call.root), ("peer", call.peer)):
        if rank is not None and not 0 <= rank < count:
            raise ValueError(
                f"{call.name}: invalid {what} rank: {rank}; the group has ranks 0 to {count - 1}"
            )


def contiguous(*names: str) -> Check:
    """Return a check that the named arguments are contiguous.

    NCCL doesn't check all of these: gather, scatter and reduce_scatter with a list garble
    non-contiguous tensors.
    """

    def check_contiguous(call: Call) -> None:
        _check_contiguous(_tensors_of(call.arguments, names))

    return check_contiguous


def _check_contiguous(tensors: Iterable[torch.Tensor]) -> None:
    """Raise ValueError unless each tensor is contiguous, possibly in a channels-last format."""
    for tensor in tensors:
        if not isinstance(tensor, VirtualTensor) or tensor.layout is not torch.strided:
            continue
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
        if not (
            tensor.is_contiguous()
            or (channels_last and tensor.is_contiguous(memory_format=channels_last))
        ):
            raise ValueError("Tensors must be contiguous")


def one_tensor_of_all_parts(call: Call) -> None:
    """Check that one tensor has room for the parts of all ranks, one after another."""
    gathers, count = call.name == "all_gather", call.group.size()
    for given, received in zip(call.inputs, call.outputs, strict=True):
        if given.dtype != received.dtype:
            raise TypeError(
                f"{call.name}: output tensor must have the same type as input tensor, got "
                f"{received.dtype} and {given.dtype}"
            )
        small, large = (given, received) if gathers else (received, given)
        if small.numel() * count != large.numel():
            raise ValueError(
                f"{call.name} among {count} ranks got an input of {given.numel()} elements and an "
                f"output of {received.numel()}: one must be {count} times as large as the other"
            )


def list_of_parts(call: Call) -> None:
    """Check that a list has one part per rank, possibly of different sizes.

    This rank's part must have as many elements as the tensor that's passed with the list.
    """
    rank = call.group.rank()
    if call.name == "all_gather":
        _check_length(call, call.outputs)
        _check_own_part(call, call.inputs[0].numel(), call.outputs[rank].numel())
        if len({part.shape for part in call.outputs}) > 1:  # broadcast one by one, not copied
            _check_contiguous(call.outputs)
    else:
        _check_length(call, call.inputs)
        _check_own_part(call, call.inputs[rank].numel(), call.outputs[0].numel())


def two_lists_of_parts(call: Call) -> None:
    for parts in (call.inputs, call.outputs):
        _check_length(call, parts)
    rank = call.group.rank()
    _check_own_part(call, call.inputs[rank].numel(), call.outputs[rank].numel())


def equal_parts_at_root(call: Call) -> None:
    """Check that the root's list has one part per rank, each with the shape of its own tensor."""
    if call.group.rank() != call.root:
        return
    parts, (own,) = (
        (call.outputs, call.inputs) if call.name == "gather" else (call.inputs, call.outputs)
    )
    _check_length(call, parts)
    for index, part in enumerate(parts):
        if part.shape != own.shape:
            raise ValueError(
                f"{call.name}: invalid tensor size at index {index} (expected {list(own.shape)}, "
                f"got {list(part.shape)})"
            )


def splits(call: Call) -> None:
    """Check that the split sizes add up to the number of rows."""
    (given,), outputs = call.inputs, call.outputs
    count, rank = call.group.size(), call.group.rank()
    sizes = call.arguments["input_split_sizes"], call.arguments["output_split_sizes"]
    own = []
    # A functional collective has no output yet: it creates one.
    for split, tensor in zip(sizes, (given, *outputs), strict=False):
        _check_split_sizes(split, tensor, count)
        rows = tensor.shape[0]
        own.append((split[rank] if split else rows // count) * (tensor.numel() // max(rows, 1)))
    if len(own) == 2:
        _check_own_part(call, *own)


def _check_split_sizes(split: Sequence[int], tensor: torch.Tensor, count: int) -> None:
    """Raise RuntimeError with the messages of c10d/Utils.hpp."""
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
            f"{call.name} among {count} ranks got a list of {len(parts)} tensors: it needs one "
            "for each rank"
        )


def _check_own_part(call: Call, given: int, received: int) -> None:
    if given != received:
        raise ValueError(
            f"{call.name}: rank {call.group.rank()} of the group sends itself {given} elements, "
            f"but has room for {received}"
        )
