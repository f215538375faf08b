"""Where ranks wait for one another: collectives and messages of process groups.

A collective starts when all of its ranks are ready for it and its wires are free: each GPU sends
and receives one thing at a time inside its host, and one out of it. A message meets its receiver,
as with NCCL. Ranks that are not there are taken to be ready as soon as those that are.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vgpu.time.resources import place_together
from vgpu.time.steps import Collective

Key = tuple[Any, ...]


class Part:
    """One rank's part of a collective."""

    __slots__ = ("has_ended", "lane", "launch_s", "moment", "player", "ready_s", "step")

    def __init__(
        self, player: Any, step: Collective, lane: Any, launch_s: float, moment: int
    ) -> None:
        self.player = player
        self.step = step
        self.lane = lane
        self.launch_s = launch_s
        self.moment = moment
        self.ready_s: float | None = None  # None until the rank has arrived
        self.has_ended = False


class Meeting:
    """The ranks that play together, and the collectives for which some wait."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = frozenset(ranks)
        self.waiting: dict[Key, list[Part]] = {}
        self._counts: Counter[Key] = Counter()

    def arrive(self, part: Part) -> None:
        """A rank is ready for its part. When all are, it begins, and each gets its times."""
        key = self._key(part)
        parts = self.waiting.setdefault(key, [])
        if parts:
            _check_alike(parts[0], part)
        parts.append(part)
        if len(parts) == len(self.expected(part)):
            del self.waiting[key]
            _begin(parts)
            for other in parts[:-1]:
                other.player.wake_later(other.lane)

    def expected(self, part: Part) -> list[int]:
        """The ranks of a collective that are there."""
        return [rank for rank in part.step.ranks if rank in self.ranks]

    def _key(self, part: Part) -> Key:
        """The same for all parts of one collective: a group's collectives have an order."""
        step, rank = part.step, part.player.rank
        way: Key = tuple(sorted(step.ranks))
        if step.name == "send":
            way = (rank, *(other for other in step.ranks if other != rank))
        elif step.name == "recv":
            way = (*(other for other in step.ranks if other != rank), rank)
        message = step.name in ("send", "recv")
        key = (step.group, message, way)
        self._counts[(rank, step.name == "send", *key)] += 1
        return (*key, self._counts[(rank, step.name == "send", *key)])


def _begin(parts: list[Part]) -> None:
    step = parts[0].step
    ready_s = max(part.launch_s if part.ready_s is None else part.ready_s for part in parts)
    duration_s = max(
        part.player.model.group_time_s(step.name, part.step.size_bytes, step.ranks)
        for part in parts
    )
    wires = [wire for part in parts for wire in part.player.wires(part)]
    start_s = place_together(wires, ready_s, duration_s)
    for part in parts:
        part.player.ended(part, start_s, start_s + duration_s)


def _check_alike(one: Part, other: Part) -> None:
    """ValueError where two ranks come to one collective with different ones."""
    first, second = one.step, other.step
    same_name = {first.name, second.name} == {"send", "recv"} or first.name == second.name
    same_size = first.size_bytes == second.size_bytes or first.name == "all_to_all"
    if not same_name or not same_size:
        raise ValueError(
            f"ranks {one.player.rank} and {other.player.rank} meet in group {first.group!r} of "
            f"ranks {list(first.ranks)} with different calls: {first.name} of "
            f"{first.size_bytes:,} bytes and {second.name} of {second.size_bytes:,} bytes. All "
            "ranks of a group must call the same collectives in the same order"
        )
