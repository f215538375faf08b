"""Checks for lesson 14: mesh groups and names, running softmax, balanced ring, expert capacity."""

import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

import vgpu
from helpers import devices
from helpers.checks.core import Wrong, exercise, expect_close, expect_equal, for_input
from helpers.checks.watchers import ReadBacks
from vgpu.profiling import EagerDispatchMode, OperatorLog
from vgpu.units import format_seconds


@exercise("14.1", "The groups of a mesh")
def groups_of(answer: Callable[[tuple[int, ...], int], list[list[int]]]) -> dict[str, Any]:
    meshes = [((2, 4), 1), ((2, 4), 0), ((2, 3, 2), 1), ((4, 1, 2), 1), ((4, 2, 8), 1)]
    sizes = tuple(random.choice((2, 3, 4)) for _ in range(3))
    meshes += [(sizes, dimension) for dimension in range(3)]
    for sizes, dimension in meshes:
        given = f"sizes {sizes}, dimension {dimension}"
        expected = _groups(sizes, dimension)
        with for_input(given, "Return a list of groups, each a list of ranks."):
            yours = answer(sizes, dimension)
            groups = _as_groups(yours)
            if sorted(groups) != sorted(expected):
                raise Wrong(
                    yours=yours,
                    expected=expected,
                    hint=_hint_for_groups(groups, expected, sizes, dimension),
                    values=True,
                )
    return {
        "meshes": len(meshes),
        "the last test case": f"{sizes}, dimension {dimension}: {len(expected)} groups, the first is "
        f"{expected[0]}",
        "stuck, out of 64 GPUs": ", ".join(
            f"rank {rank} waits for rank 21"
            for group in _as_groups(answer((4, 2, 8), 1))
            if 21 in group
            for rank in group
            if rank != 21
        ),
    }


def _as_groups(yours: Any) -> list[list[int]]:
    """Return the groups as lists of numbers, or an empty list if ``yours`` has no such groups."""
    try:
        return [[int(rank) for rank in group] for group in yours]
    except (TypeError, ValueError, RuntimeError):  # not iterable, or not numbers
        return []


def _hint_for_groups(
    groups: list[list[int]], expected: list[list[int]], sizes: Sequence[int], dimension: int
) -> str:
    if not groups:
        return "Return a list of groups, each a list of ranks, such as [[0, 1], [2, 3]]."
    if sorted(map(sorted, groups)) == sorted(expected):
        return "The groups have the right ranks, but each group must be in ascending order."
    if {len(group) for group in groups} != {sizes[dimension]}:
        return f"Each group in this dimension has {sizes[dimension]} ranks, the dimension's size."
    if sorted(groups) == sorted(_groups(sizes[::-1], len(sizes) - 1 - dimension)):
        return "The last dimension varies fastest, not the first: its ranks are neighbors."
    return "Two ranks are in the same group if they differ only in their index in this dimension."


_DIMENSIONS = ("replicate", "shard", "tensor")


@exercise("14.2", "Name the dimensions")
def mesh_for(answer: Callable[[int, int, int], Any]) -> dict[str, Any]:
    clusters = [(2, 8, 8), (8, 8, 4), (random.randint(3, 5), 8, 2), (3, 4, 2)]
    for hosts, gpus_per_host, tensor in clusters:
        given = f"hosts {hosts}, gpus_per_host {gpus_per_host}, tensor {tensor}"
        with for_input(given, "Return two tuples: three sizes, and the three names."):
            sizes, names = map(tuple, answer(hosts, gpus_per_host, tensor))
            if sorted(names) != sorted(_DIMENSIONS) or len(sizes) != len(names):
                raise Wrong(
                    yours=f"sizes {sizes}, names {names}",
                    expected=f"three sizes, and the names {', '.join(_DIMENSIONS)}, each once",
                    hint="The mesh needs three dimensions: for the copies of the model, for each copy's "
                    "shards, and for the parts of each matmul.",
                )
            if math.prod(sizes) != hosts * gpus_per_host:
                raise Wrong(
                    yours=f"sizes {sizes} for {math.prod(sizes)} GPUs",
                    expected=f"{hosts * gpus_per_host} GPUs",
                    hint="The product of the sizes must be the number of GPUs: how many tensor groups "
                    "fit on a host?",
                )
            groups = _groups_by_name(sizes, names)
            _expect_places(groups, hosts, gpus_per_host, tensor)
    cost = vgpu.CostModel(
        vgpu.PRESETS["H100"],
        network=vgpu.NETWORKS["InfiniBand NDR"],
        gpus_per_host=gpus_per_host,
    )
    order = sorted(_DIMENSIONS, key=lambda name: name != "tensor")
    tensor_first = _groups_by_name([len(groups[name][0]) for name in order], order)
    times = (
        format_seconds(cost.group_time_s("all_reduce", 2**30, each["tensor"][0]))
        for each in (groups, tensor_first)
    )
    return {
        "rank 0's groups": ", ".join(f"{name} {groups[name][0]}" for name in _DIMENSIONS)
        + f" for {given}",
        "an all-reduce of 1 GiB in a tensor group": '{}; with "tensor" first, {} (H100s, '
        "InfiniBand NDR)".format(*times),
    }


def _groups_by_name(sizes: Sequence[int], names: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return each dimension's groups of ranks; the first is rank 0's."""
    return {name: _groups(sizes, dimension) for dimension, name in enumerate(names)}


def _groups(sizes: Sequence[int], dimension: int) -> list[list[int]]:
    ranks = torch.arange(math.prod(sizes)).view(*sizes)
    return ranks.movedim(dimension, -1).reshape(-1, sizes[dimension]).tolist()


def _expect_places(
    groups: dict[str, list[list[int]]], hosts: int, gpus_per_host: int, tensor: int
) -> None:
    """Raise ``Wrong`` unless the groups have the right sizes and are on the right hosts."""
    if (size := len(groups["tensor"][0])) != tensor:
        raise Wrong(
            yours=f"tensor groups of {size}, such as {groups['tensor'][0]}",
            expected=f"tensor groups of {tensor}",
            hint="The first size is for the first name, and so on.",
        )
    hints = {
        "tensor": "The group's all-reduces would cross the network. A step in the last dimension "
        "leads to the next rank, on the same host.",
        "shard": "A step in the first dimension leads to another host. Only replicate groups may "
        "span hosts.",
    }
    for name, hint in hints.items():
        for group in groups[name]:
            if len({rank // gpus_per_host for rank in group}) > 1:
                raise Wrong(
                    yours=f"the {name} group {group}, on more than one host",
                    expected=f"each {name} group on one host of {gpus_per_host} ranks",
                    hint=hint,
                )
    if (copies := len(groups["replicate"][0])) != hosts:
        raise Wrong(
            yours=f"{copies} copies of the model",
            expected=f"{hosts}, one on each host",
            hint="A host's GPUs hold one copy together: shard times tensor must be gpus_per_host.",
        )


@exercise("14.3", "The running softmax")
def attend(answer: Callable[[torch.Tensor, Iterator[Any]], torch.Tensor]) -> dict[str, Any]:
    largest = 0.0
    # exp overflows at 89. Scores around ten thousand would be rounded so coarsely that right
    # answers would differ by more than wrong ones.
    for scale in (1.0, 20.0):
        lengths = [random.randint(8, 16) for _ in range(random.randint(3, 5))]
        given_query = scale * torch.randn(2, 3, 12, 8)
        blocks = [(scale * torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)) for n in lengths]
        if scale > 1:  # the highest score comes last, then first
            blocks.sort(key=lambda block: (given_query @ block[0].mT).amax().item())
        # With all scores below 0, starting from a highest score of 0 is wrong.
        below = [(-keys.abs(), values) for keys, values in blocks]
        turns = (given_query, blocks), (given_query, blocks[::-1]), (given_query.abs(), below)
        for query, order in turns:
            keys, values = (torch.cat(parts, dim=-2) for parts in zip(*order, strict=True))
            expected = _exactly(query, keys, values)
            scores = query @ keys.mT / 8**0.5
            given = f"blocks of {[len(k[0, 0]) for k, _ in order]} keys, "
            given += f"scores from {scores.amin():.0f} to {scores.amax():.0f}"
            held: list[int] = []
            with for_input(given, "Return a tensor of the query's shape."):
                with _Largest() as seen:
                    yours = answer(query, _one_at_a_time(order, held))
                hint = _hint_for_softmax(yours, query, order, expected)
                if scores.amax() < 0:
                    hint += (
                        " Start from a highest score of minus infinity: all scores could be "
                        "below 0."
                    )
                expect_close(yours, expected, hint=hint, rtol=1e-3, atol=1e-4)
                room = 2 * 3 * 12 * max(8, *(k.size(-2) for k, _ in order))
                if seen.numel > room:
                    raise Wrong(
                        yours=f"a tensor with {seen.numel} elements",
                        expected=f"at most {room}, the number of scores for the largest block",
                        hint="The values are right, but you joined blocks. Process one at a time.",
                    )
                if max(held, default=0) > 2:  # a loop also holds the previous block
                    raise Wrong(
                        yours=f"{max(held)} blocks held at once",
                        expected="one, and only while it's needed",
                        hint="The values are right, but earlier blocks are kept. Keep only the "
                        "highest score, the sum, and the output so far, and drop each block.",
                    )
            largest = max(largest, seen.numel / (2 * 3 * 12 * keys.size(-2)))
    return {
        "scores": f"as low as {scores.amin():.0f}, but no query's weights were all 0",
        "your largest tensor": f"{largest:.0%} of the full score matrix",
    }


def _exactly(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query.double(), keys.double(), values.double()).float()


def _one_at_a_time(blocks: Sequence[Any], held: list[int]) -> Iterator[Any]:
    """Yield the blocks; record in ``held`` how many earlier ones are alive at each request."""
    given: list[list[weakref.ref[torch.Tensor]]] = []
    for keys, values in blocks:
        block = keys.clone(), values.clone()
        given.append([weakref.ref(tensor) for tensor in block])
        yield block
        del block
        held.append(sum(any(part() is not None for part in parts) for parts in given))


class _Largest(EagerDispatchMode):
    """Record the number of elements in the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def _hint_for_softmax(
    yours: Any, query: torch.Tensor, blocks: Sequence[Any], expected: torch.Tensor
) -> str:
    if not isinstance(yours, torch.Tensor) or yours.shape != expected.shape:
        return "Return a tensor of the query's shape, with one output for each query."
    if not torch.isfinite(yours).all():
        return (
            "exp overflows, or all of a query's weights are 0: in each block, first subtract the "
            "highest score that this query has seen so far."
        )
    own = [F.scaled_dot_product_attention(query, k, v) for k, v in blocks]
    if torch.allclose(yours, torch.stack(own).mean(0), atol=1e-3):
        return "The blocks' results can't just be averaged: a block with higher scores counts more."
    if torch.allclose(yours, own[-1], atol=1e-3):
        return "This is the result for the last block alone."
    unscaled = [(k * 8**0.5, v) for k, v in blocks]
    keys, values = (torch.cat(parts, dim=-2) for parts in zip(*unscaled, strict=True))
    if torch.allclose(yours, F.scaled_dot_product_attention(query, keys, values), atol=1e-3):
        return "The scores lack their factor, D ** -0.5."
    return (
        "When a block has a higher score, multiply the sum and the output so far by "
        "exp(old highest - new highest)."
    )


@exercise("14.4", "Balance the ring")
def balanced(answer: Callable[[int, int], Sequence[int]]) -> dict[str, Any]:
    shown = {}
    for ranks in (2, 4, random.choice((3, 5, 6, 7)), 8):
        given = f"{ranks} ranks, {2 * ranks} chunks"
        with for_input(given, "Return the indices of two chunks."):
            held = [tuple(answer(rank, ranks)) for rank in range(ranks)]
            dealt = ", ".join(f"rank {rank}: {chunks}" for rank, chunks in enumerate(held))
            if sorted(chunk for chunks in held for chunk in chunks) != list(range(2 * ranks)):
                raise Wrong(
                    yours=dealt,
                    expected=f"each of the chunks 0 to {2 * ranks - 1} on one rank, two per rank",
                    hint="A chunk that no rank holds is missing; one that two ranks hold is computed "
                    "twice.",
                )
            # Chunk i attends to itself, half masked, and to the i chunks before it.
            work = [sum(chunk + 0.5 for chunk in chunks) for chunks in held]
            mean = sum(work) / ranks
            if max(work) > mean or any(len(chunks) != 2 for chunks in held):
                busiest = work.index(max(work))
                raise Wrong(
                    yours=f"rank {busiest} computes {max(work):g} pairs of chunks ({dealt})",
                    expected=f"the mean, {mean:g}, on each rank",
                    hint="Later chunks attend to more. Give each rank an early one and a late one.",
                )
        in_order = 4 * ranks - 2
        shown[f"{ranks} ranks"] = (
            f"{max(work):g} pairs of chunks on each; with chunks in order, up to {in_order:g}, "
            f"{in_order / max(work):.2f} times as many"
        )
    return shown


@exercise("14.5", "An expert's capacity")
def within_capacity(answer: Callable[[torch.Tensor, int, int], torch.Tensor]) -> dict[str, Any]:
    operations = {}
    device = devices.lab(1)[0]
    for tokens in (10, 1000, random.randint(100, 300)):
        # 10 and 1000 tokens have the same number of experts, so a loop over experts is within budget.
        experts = 4 if tokens in (10, 1000) else 8
        chosen = (torch.rand(tokens) ** 2 * experts).long()  # low indices are more frequent
        capacity = math.ceil(1.25 * tokens / experts)
        if tokens == 10:
            chosen, capacity = torch.tensor([1, 0, 1, 1, 3, 1, 0, 3, 1, 0]), 2
        on_gpu = chosen.to(device)
        given = f"{tokens} tokens on {device}, {experts} experts, capacity {capacity}"
        given += f", chosen {chosen.tolist()}" if tokens == 10 else ""
        with for_input(given, "Return a tensor of booleans, one for each token."):
            with ReadBacks(device.type) as asked, OperatorLog() as calls:
                yours = answer(on_gpu, experts, capacity)
            if isinstance(yours, torch.Tensor) and yours.dtype != torch.bool:
                raise Wrong(
                    yours=f"a tensor with dtype {yours.dtype}",
                    expected="a tensor with dtype torch.bool",
                    hint="A comparison returns booleans.",
                )
            expected = _first_come(chosen, capacity).to(device)
            expect_equal(yours, expected, hint=_hint_for_capacity(yours, expected))
        operations[tokens] = len(calls.names)
        fullest = chosen.bincount(minlength=experts).max().item()
    if operations[1000] > operations[10]:
        raise Wrong(
            yours=f"{operations[10]} operations for 10 tokens, {operations[1000]} for 1000",
            expected="no more for 1000 than for 10",
            given="1000 tokens",
            hint="The values are right, but a loop over tokens makes the GPU wait for Python.",
        )
    if asked.count:
        raise Wrong(
            yours=f"{asked.count} tensors read back from {device}",
            expected="none",
            given=given,
            hint="The values are right, but .tolist(), .cpu() and nonzero() make the host wait for "
            "the GPU: count on the GPU.",
        )
    return {
        "kept": f"{int(expected.sum())} of {tokens} tokens; the busiest expert was sent {fullest}, "
        f"and each has a capacity of {capacity}",
        "your operations": f"{operations[1000]} for 1000 tokens, {operations[10]} for 10",
    }


def _first_come(chosen: torch.Tensor, capacity: int) -> torch.Tensor:
    tokens: dict[int, int] = {}
    kept = []
    for expert in chosen.tolist():
        tokens[expert] = tokens.get(expert, 0) + 1
        kept.append(tokens[expert] <= capacity)
    return torch.tensor(kept)


def _hint_for_capacity(yours: Any, expected: torch.Tensor) -> str:
    if not isinstance(yours, torch.Tensor) or yours.shape != expected.shape:
        return "Return a tensor of booleans, one for each token."
    if yours.device != expected.device:
        return "Create the tensor where chosen is: device=chosen.device."
    if int(yours.sum()) == int(expected.sum()):
        return (
            "The number is right, but the tokens are wrong: an expert keeps those that come first."
        )
    if int(yours.sum()) > int(expected.sum()):
        return (
            "Too many are kept: each expert takes at most capacity tokens. Number them from 1, not "
            "from 0."
        )
    return "Too few are kept: an expert takes its first tokens even if more come later."
