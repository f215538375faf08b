"""Autograd graphs: their nodes, and the bytes that they save for backward."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True)
class Node:
    """One step of a backward pass, as recorded by autograd.

    ``label`` is the operation's name without "Backward0", or the name of the tensor whose gradient
    is accumulated here. ``depth`` is the length of the longest path from the result.
    """

    label: str
    is_leaf: bool
    depth: int


@dataclass(frozen=True)
class Graph:
    """The nodes, starting with the result's, and the edges, as index pairs (later, earlier)."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]


def graph_of(result: torch.Tensor, names: Mapping[str, torch.Tensor] | None = None) -> Graph:
    """Return the graph that ``result.backward()`` would traverse, read from ``grad_fn``.

    ``names`` labels leaves; a named intermediate result is shown with its operation, as in
    "h = Mul". The graph is empty if ``result`` has no ``grad_fn``.
    """
    functions, edges = _walk(result.grad_fn)
    named = {id(tensor): name for name, tensor in (names or {}).items()}
    prefixes = {
        t.grad_fn: f"{name} = " for name, t in (names or {}).items() if t.grad_fn is not None
    }
    depths = _longest_ways(len(functions), edges)
    nodes = tuple(
        Node(
            prefixes.get(function, "") + _label(function, named),
            hasattr(function, "variable"),
            depth,
        )
        for function, depth in zip(functions, depths, strict=True)
    )
    return Graph(nodes, tuple(edges))


def shared_part(whole: torch.Tensor, cut: torch.Tensor) -> tuple[set[int], set[int]]:
    """Return the indices of nodes and edges of ``graph_of(whole)`` that ``cut``'s graph also has.

    Both tensors must come from the same expression, except that ``cut`` may lack some of its branches.
    """
    functions, edges = _walk(whole.grad_fn)
    twins = {0: cut.grad_fn} if functions and cut.grad_fn is not None else {}
    numbers = iter(range(len(edges)))
    kept_edges = set()
    for index, function in enumerate(functions):
        # Edges of the full graph are numbered even if they have no counterpart.
        ways = [
            position for position, (f, _) in enumerate(function.next_functions) if f is not None
        ]
        for position in ways:
            number = next(numbers)
            twin = twins[index].next_functions[position][0] if index in twins else None
            if twin is not None:
                kept_edges.add(number)
                twins[edges[number][1]] = twin
    return set(twins), kept_edges


def count_nodes(result: torch.Tensor) -> int:
    """Return the number of graph nodes that a tensor keeps alive; 0 if it has no graph."""
    return len(_walk(result.grad_fn)[0])


def _walk(start: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return every function reachable from ``start``, once each, and the edges between them."""
    # Functions are kept in a list, because a freed wrapper's id can be reused. There's no recursion,
    # because summed losses make chains far longer than Python's recursion limit.
    functions = [start] if start is not None else []
    known = {start: 0}
    edges = []
    for index, function in enumerate(functions):  # grows during the loop
        for following, _ in function.next_functions:
            if following is None:
                continue
            if following not in known:
                known[following] = len(functions)
                functions.append(following)
            edges.append((index, known[following]))
    return functions, edges


def _longest_ways(count: int, edges: list[tuple[int, int]]) -> list[int]:
    depths = [0] * count
    changed = True
    while changed:  # an acyclic graph settles after at most ``count`` rounds
        changed = False
        for later, earlier in edges:
            if depths[earlier] <= depths[later]:
                depths[earlier] = depths[later] + 1
                changed = True
    return depths


def _label(function: Any, named: Mapping[int, str]) -> str:
    if hasattr(function, "variable"):
        return named.get(id(function.variable), "leaf")
    return function.name().rsplit("::")[-1].removesuffix("0").removesuffix("Backward")


class _Kept:
    """One tensor saved by autograd; freed when autograd frees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # The tensor is detached, because otherwise its graph would keep it alive.
        self.tensor = tensor.detach()
        self.version = tensor._version


class SavedTensors:
    """A context manager that counts the tensors that autograd saves for backward.

    ``live_bytes()`` returns how many of their bytes are still alive, inside the block or after it.
    A storage saved by multiple operations counts once; the storages of tensors in ``ignore`` (such
    as parameters, which exist anyway) don't count. The implementation uses
    ``torch.autograd.graph.saved_tensors_hooks``. As usual, ``backward()`` raises RuntimeError if a
    saved tensor was modified in place.
    """

    def __init__(self, ignore: Any = ()) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._kept.add(kept)
        return kept

    def live_bytes(self) -> int:
        storages = {}
        for kept in self._kept:
            storage = kept.tensor.untyped_storage()
            if storage.data_ptr() not in self._ignored:
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._hooks.__exit__(*exc_info)


def _unpack(kept: _Kept) -> torch.Tensor:
    # Autograd skips this check for tensors that were saved through hooks.
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a saved tensor of shape {tuple(kept.tensor.shape)} is at version "
            f"{kept.tensor._version}; expected version {kept.version} instead"
        )
    return kept.tensor
