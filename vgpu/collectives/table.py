"""The table of collectives: their operators, checks, bytes and times.

Real ranks, virtual clusters, collective counters, the simulator, hang reports and plans read the
table; the checks are in calls.py. To add a collective, add a row.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from vgpu.collectives import calls
from vgpu.collectives.calls import Call, Check, contiguous, size_bytes_of
from vgpu.tensor.operators import Args, Kwargs, Operator, named_arguments


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
    """Return the time of a ring or, across hosts, of a ring or a tree, whichever is faster.

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

    The bytes take as long as over one link, and each of the n - 1 hops adds its latency. Source:
    Chan et al., 2007, Collective communication: theory, practice, and experience (pipelined).
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
    """Return the fraction that all but one of n equal parts make up."""
    return (count - 1) / count


# The table

_WHOLE = (contiguous("output_tensor", "input_tensor"), calls.one_tensor_of_all_parts)
_WHOLE_COALESCED = (contiguous("outputs", "inputs"), calls.one_tensor_of_all_parts)
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
            "c10d::reduce_scatter_": (contiguous("output_tensors"), calls.list_of_parts),
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
            "c10d::allgather_": (contiguous("input_tensors"), calls.list_of_parts),
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
            "c10d::alltoall_": (_LISTS, calls.two_lists_of_parts),
            "c10d::alltoall_base_": (contiguous("output", "input"), calls.splits),
            "_c10d_functional::all_to_all_single": (calls.splits,),
            "_dtensor::shard_dim_alltoall": _UNCHECKED,
        },
        size_bytes=_inputs,
        sent_share=_ring_pass,
        seconds=_all_to_all,
    ),
    "gather": Collective(
        operators={
            "c10d::gather_": (_LISTS, calls.equal_parts_at_root),
            "c10d::gather_into_tensor_": _UNCHECKED,  # since torch 2.15
        },
        size_bytes=_gathered,
        sent_share=None,
        seconds=_all_to_all,
    ),
    "scatter": Collective(
        operators={"c10d::scatter_": (_LISTS, calls.equal_parts_at_root)},
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
    # Not a function of torch, but the simulator's step around a ring: each GPU sends to one and
    # receives from one.
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
"""Maps an operator's name, with its namespace, to the collective's name in torch.distributed."""

SAME_ELEMENTS = {name for name, each in COLLECTIVES.items() if each.same_elements}


def read_call(func: Operator, args: Args, kwargs: Kwargs) -> Call:
    """Read a call of an operator in ``NAMES``, with values or as shapes, without checking it."""
    arguments = named_arguments(func, args, kwargs)
    return call_of(func._schema.name, arguments, calls.group_of(arguments))


def call_of(operator: str, arguments: Kwargs, group: dist.ProcessGroup) -> Call:
    call = Call(NAMES[operator], operator, arguments, group)
    call.size_bytes = COLLECTIVES[call.name].size_bytes(call)
    return call


def check(call: Call) -> None:
    """Raise ValueError, TypeError or RuntimeError if the collective can't handle its arguments."""
    calls.check_ranks(call)
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

    Raises ValueError for an unknown name, with the list of collectives.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"no collective is called {name!r}; use one of {', '.join(COLLECTIVES)}")
    if count < 1:
        raise ValueError(f"{name} among {count} GPUs: a collective needs at least one GPU")
    return COLLECTIVES[name].seconds(size_bytes, count, route) if count > 1 else 0.0
