"""The table of collectives: their operators, checks, bytes and times.

Real ranks, virtual clusters, collective counters, the simulator, hang reports and plans read the
table. To add a collective, add a row. ``Call`` tells from the arguments' names which tensors the
collective reads and writes; if its arguments have other names, extend ``Call``, too.

Sizes are defined as in nccl-tests (doc/PERFORMANCE.md): the size of the full tensor, which is the
gathered tensor for ``all_gather``, the tensor before scattering for ``reduce_scatter``, one GPU's
tensor for ``all_to_all``, and what each GPU sends for ``permute``.

The time formulas are the usual ones, with a latency per step and a bandwidth for the bytes
(Hockney, 1994), for the algorithms that NCCL uses for large messages: rings, and trees for an
all-reduce across hosts. Not modeled: NCCL's faster protocols for small messages, reductions inside
NVSwitch and inside switches between hosts, and the time for the additions.

Between hosts, a ring enters and leaves each host once per adapter, so a group with more GPUs per
host uses more adapters. All GPUs of a host are assumed to send at once, each over its share of the
adapters. If hosts have different numbers of GPUs, the one with the fewest slows down the ring, and
its GPUs have the most to send to other hosts.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vgpu.tensor.operators import Args, Kwargs, Operator, named_arguments, tensors_in
from vgpu.tensor.tensor import VirtualTensor

# Calls, and the checks that may reject them
#
# Real ranks and a virtual cluster's ranks reject the same calls, raising NCCL's errors for what
# NCCL checks (ProcessGroupNCCL.cpp, c10d/Utils.hpp). They also reject calls that would make NCCL
# read or write past the end of a tensor, or between the elements of a non-contiguous one.
# Functional collectives need few checks, because they create their results and copy non-contiguous
# inputs.


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
        """The size of the full tensor, as defined by nccl-tests; ``call_of`` sets it."""
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
    """Check that the root's list has one part per rank, each shaped like the root's own tensor."""
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


@dataclass(frozen=True)
class Collective:
    """One collective in ``torch.distributed``."""

    operators: Mapping[str, tuple[Check, ...]]
    """The operators in ``torch.ops`` that implement it, each with the checks for its arguments."""
    size_bytes: Callable[[Call], int]
    sent_share: Callable[[int], float] | None
    """Returns the fraction of ``size_bytes`` that each of n ranks sends; None if ranks differ."""
    seconds: Callable[[float, int, "Route"], float]
    """Returns the seconds for ``size_bytes``, a number of GPUs, and a route."""
    same_elements: bool = False
    """Whether all ranks must pass the same dtype and number of elements; shapes may differ."""


# Seconds


class Route(NamedTuple):
    """The links that a group's bytes cross: one GPU's, inside its host and to other hosts."""

    latency_s: float
    bytes_per_s: float
    hosts: int = 1  # how many the group spans
    fewest: int = 1  # the smallest number of the group's GPUs on any of these hosts
    most: int = 1  # the largest such number
    network_latency_s: float = 0.0
    network_bytes_per_s: float = math.inf  # a GPU's share of its host's adapters

    @property
    def ring_bytes_per_s(self) -> float:
        """The rate through each point of a ring of the group's GPUs, over all channels."""
        if self.hosts == 1:
            return self.bytes_per_s
        between = self.fewest * self.network_bytes_per_s
        return between if self.most == 1 else min(self.bytes_per_s, between)

    def steps_s(self, count: int) -> float:
        """Return the total latency of passing data once around a ring of ``count`` GPUs."""
        between = self.hosts - 1
        return (count - 1 - between) * self.latency_s + between * self.network_latency_s


def _all_reduce(size_bytes: float, count: int, route: Route) -> float:
    """Return the time of a ring or, across hosts, of a tree if that's faster.

    A barrier takes as long as an all-reduce of one byte. The ring is a reduce-scatter, then an
    all-gather. Source of the tree: Sanders et al., 2009, Two-tree algorithms for full bandwidth
    broadcast, reduction and scan.
    """
    ring_s = _all_gather(size_bytes, count, route) + _reduce_scatter(size_bytes, count, route)
    return ring_s if route.hosts == 1 else min(ring_s, _tree(size_bytes, count, route))


def _tree(size_bytes: float, count: int, route: Route) -> float:
    """Return the time to send sums up and down a tree of hosts, along a chain in each host.

    The bytes cross each link twice; 0.92 of a ring's bandwidth is NCCL's own estimate (tuning.cc).
    """
    inside, levels = route.most - 1, math.ceil(math.log2(route.hosts))
    steps_s = 2 * (inside * route.latency_s + levels * route.network_latency_s)
    return steps_s + 2 * size_bytes / (0.92 * route.ring_bytes_per_s)


def _all_gather(size_bytes: float, count: int, route: Route) -> float:
    """Return the time of a ring: n - 1 steps, in each of which every GPU sends 1/n of the bytes.

    Source: Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms.
    """
    passed_bytes = (count - 1) * size_bytes / count
    return route.steps_s(count) + passed_bytes / route.ring_bytes_per_s


_reduce_scatter = _all_gather  # the same steps, with a sum in each


def _broadcast(size_bytes: float, count: int, route: Route) -> float:
    """Return the time of a chain: small parts pass from GPU to GPU, so all links are busy at once.

    The bytes take as long as they would over one link, and each of the n - 1 hops adds its latency.
    Source: Chan et al., 2007, Collective communication: theory, practice, and experience
    (pipelined).
    """
    return route.steps_s(count) + size_bytes / route.ring_bytes_per_s


_reduce = _broadcast  # the same chain in the other direction, with a sum at each hop


def _all_to_all(size_bytes: float, count: int, route: Route) -> float:
    """Return the time if every GPU sends 1/n of its bytes to each of the others, all at once.

    Source: NCCL user guide, point-to-point communication (grouped sends and receives).
    """
    most = count if route.hosts == 1 else route.most
    inside_s = route.latency_s + (most - 1) / count * size_bytes / route.bytes_per_s
    if route.hosts == 1:
        return inside_s
    between_s = (count - route.fewest) / count * size_bytes / route.network_bytes_per_s
    return max(inside_s, route.network_latency_s + between_s)


def _send(size_bytes: float, count: int, route: Route) -> float:
    if route.hosts > 1:
        return route.network_latency_s + size_bytes / route.network_bytes_per_s
    return route.latency_s + size_bytes / route.bytes_per_s


# Bytes


def _inputs(call: Call) -> int:
    return call.input_bytes


def _gathered(call: Call) -> int:
    """Return the bytes of all parts, which may differ in size.

    A functional all-gather has no outputs until it has run.
    """
    outputs = call.outputs if call.name == "all_gather" else []
    return size_bytes_of(outputs) or call.input_bytes * call.group.size()


def _scattered(call: Call) -> int:
    return size_bytes_of(call.outputs) * call.group.size()


def _outputs(call: Call) -> int:
    return size_bytes_of(call.outputs)


def _one_byte(call: Call) -> int:
    return 1


def _ring_pass(count: int) -> float:
    """Return the fraction of a tensor in all but one of its n equal parts: (n - 1) / n."""
    return (count - 1) / count


# The table

_WHOLE = (contiguous("output_tensor", "input_tensor"), one_tensor_of_all_parts)
_WHOLE_COALESCED = (contiguous("outputs", "inputs"), one_tensor_of_all_parts)
_LISTS = contiguous("output_tensors", "input_tensors")
_UNCHECKED: tuple[Check, ...] = ()


def _functional(*names: str) -> dict[str, tuple[Check, ...]]:
    """Return functional operators, which create their outputs and copy non-contiguous inputs."""
    return {f"_c10d_functional::{name}": _UNCHECKED for name in names}


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        operators={
            "c10d::allreduce_": (contiguous("tensors"),),
            "c10d::allreduce_coalesced_": _UNCHECKED,
            **_functional("all_reduce", "all_reduce_"),
            **_functional("all_reduce_coalesced", "all_reduce_coalesced_"),
        },
        size_bytes=_inputs,
        sent_share=lambda count: 2 * _ring_pass(count),
        seconds=_all_reduce,
        same_elements=True,
    ),
    "reduce_scatter": Collective(
        operators={
            "c10d::_reduce_scatter_base_": _WHOLE,
            "c10d::reduce_scatter_tensor_coalesced_": _WHOLE_COALESCED,
            # The inputs are copied into one contiguous tensor.
            "c10d::reduce_scatter_": (contiguous("output_tensors"), list_of_parts),
            **_functional("reduce_scatter_tensor", "reduce_scatter_tensor_out"),
            **_functional("reduce_scatter_tensor_coalesced"),
        },
        size_bytes=_inputs,
        sent_share=_ring_pass,
        seconds=_reduce_scatter,
    ),
    "all_gather": Collective(
        operators={
            "c10d::_allgather_base_": _WHOLE,
            "c10d::allgather_into_tensor_coalesced_": _WHOLE_COALESCED,
            # The outputs are copied from one contiguous tensor.
            "c10d::allgather_": (contiguous("input_tensors"), list_of_parts),
            "c10d::allgather_coalesced_": _UNCHECKED,
            **_functional("all_gather_into_tensor", "all_gather_into_tensor_out"),
            **_functional("all_gather_into_tensor_coalesced"),
        },
        size_bytes=_gathered,
        sent_share=_ring_pass,
        seconds=_all_gather,
    ),
    "broadcast": Collective(
        operators={
            "c10d::broadcast_": (contiguous("tensors"),),
            **_functional("broadcast", "broadcast_"),
        },
        size_bytes=_inputs,
        sent_share=lambda count: 1.0,
        seconds=_broadcast,
        same_elements=True,
    ),
    "reduce": Collective(
        operators={"c10d::reduce_": (contiguous("tensors"),)},
        size_bytes=_inputs,
        sent_share=lambda count: 1.0,
        seconds=_reduce,
        same_elements=True,
    ),
    "all_to_all": Collective(
        operators={
            "c10d::alltoall_": (_LISTS, two_lists_of_parts),
            "c10d::alltoall_base_": (contiguous("output", "input"), splits),
            "_c10d_functional::all_to_all_single": (splits,),
            "_dtensor::shard_dim_alltoall": _UNCHECKED,
        },
        size_bytes=_inputs,
        sent_share=_ring_pass,
        seconds=_all_to_all,
    ),
    "gather": Collective(
        operators={
            "c10d::gather_": (_LISTS, equal_parts_at_root),
            "c10d::gather_into_tensor_": _UNCHECKED,  # since torch 2.15
        },
        size_bytes=_gathered,
        sent_share=None,
        seconds=_all_to_all,
    ),
    "scatter": Collective(
        operators={"c10d::scatter_": (_LISTS, equal_parts_at_root)},
        size_bytes=_scattered,
        sent_share=None,
        seconds=_all_to_all,
    ),
    "send": Collective(
        operators={"c10d::send": _UNCHECKED, "_c10d_functional::isend": _UNCHECKED},
        size_bytes=_inputs,
        sent_share=lambda count: 1.0,
        seconds=_send,
    ),
    "recv": Collective(
        operators={
            "c10d::recv_": _UNCHECKED,
            "c10d::recv_any_source_": _UNCHECKED,
            "_c10d_functional::irecv": _UNCHECKED,
        },
        size_bytes=_outputs,
        sent_share=lambda count: 0.0,
        seconds=_send,
    ),
    # Not a function of torch, but the simulator's step around a ring: each GPU sends to one
    # neighbor and receives from the other.
    "permute": Collective(
        operators={},
        size_bytes=_inputs,
        sent_share=lambda count: 1.0,
        seconds=_send,
    ),
    "barrier": Collective(
        operators={"c10d::barrier": _UNCHECKED},
        size_bytes=_one_byte,
        sent_share=None,
        seconds=_all_reduce,
    ),
}

NAMES = {operator: name for name, each in COLLECTIVES.items() for operator in each.operators}
"""Maps operators' names, including namespaces, to collectives' names in torch.distributed."""

SAME_ELEMENTS = {name for name, each in COLLECTIVES.items() if each.same_elements}


def read_call(func: Operator, args: Args, kwargs: Kwargs) -> Call:
    """Read a call of an operator in ``NAMES``, with values or as shapes, without checking it."""
    arguments = named_arguments(func, args, kwargs)
    return call_of(func._schema.name, arguments, group_of(arguments))


def call_of(operator: str, arguments: Kwargs, group: dist.ProcessGroup) -> Call:
    call = Call(NAMES[operator], operator, arguments, group)
    call.size_bytes = COLLECTIVES[call.name].size_bytes(call)
    return call


def check(call: Call) -> None:
    """Raise ValueError, TypeError or RuntimeError if the collective can't handle its arguments."""
    check_ranks(call)
    for check_arguments in COLLECTIVES[call.name].operators[call.operator]:
        check_arguments(call)


def sent_bytes(name: str, size_bytes: float, count: int) -> float:
    """Return the bytes that each of ``count`` ranks sends (the last one in a chain sends none).

    Raises NotImplementedError for collectives in which ranks send different amounts.
    """
    share = COLLECTIVES[name].sent_share
    if share is None:
        counted = (
            other for other, each in COLLECTIVES.items() if each.sent_share and each.operators
        )
        raise NotImplementedError(
            f"the bytes that a rank sends are counted only for {', '.join(counted)}, not for {name}"
        )
    return share(count) * size_bytes


def seconds(name: str, size_bytes: float, count: int, route: Route) -> float:
    """Return the seconds that a collective takes among ``count`` GPUs; 0 for a single one.

    Raises ValueError for an unknown name; the message lists the collectives.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"no collective is called {name!r}; use one of {', '.join(COLLECTIVES)}")
    if count < 1:
        raise ValueError(f"{name} among {count} GPUs: a collective needs at least one GPU")
    return COLLECTIVES[name].seconds(size_bytes, count, route) if count > 1 else 0.0
