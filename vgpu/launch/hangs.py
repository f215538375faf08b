"""Why ranks hang, worked out from where each of them is."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from vgpu.collectives.table import SAME_ELEMENTS
from vgpu.launch.call_sites import Collective, Place, Snapshot


def explain(snapshots: Sequence[Snapshot | None], label: Callable[[str], str]) -> str:
    """One line for each rank, then which collectives wait for whom.

    A rank without a snapshot did not answer. ``label`` turns a file name into what the reader
    knows, such as "Cell In[3]".
    """
    lines = [f"rank {rank} {_describe(s, label)}" for rank, s in enumerate(snapshots)]
    return "\n".join(f"  {line}" for line in lines + _who_misses(snapshots))


def is_deadlock(snapshots: Sequence[Snapshot | None], within_s: float = float("inf")) -> bool:
    """Whether no rank can ever go on: each waits for one that has returned or waits in turn.

    Only collectives count, since the flight recorder knows for them who has come. The answer is
    certain if no rank has moved on while the snapshots were taken. A rank whose collective times
    out within ``within_s`` seconds is no part of a deadlock: it will raise an error of its own.
    """
    if any(s and s.unfinished and _gives_up(s) < within_s for s in snapshots):
        return False
    held_up = {rank for rank, s in enumerate(snapshots) if s and s.waits and s.unfinished}
    returned = {rank for rank, s in enumerate(snapshots) if s and s.stage == "has returned"}
    if not held_up or len(held_up) + len(returned) < len(snapshots):
        return False
    while True:
        hopeless = set()
        for rank in held_up:
            snapshot = snapshots[rank]
            assert snapshot is not None
            first = snapshot.unfinished[0]
            awaited = set(_missing(snapshots, first)) & (held_up | returned)
            if awaited or _is_mismatch(_records(snapshots, first).values()):
                hopeless.add(rank)
        if hopeless == held_up:
            return bool(held_up)
        held_up = hopeless


def _gives_up(snapshot: Snapshot) -> float:
    """Seconds, counted from its beginning, after which a rank's wait times out."""
    if snapshot.place and re.search(r"\.wait\([^)]", snapshot.place.text):
        return 0.0  # work.wait(timeout): only the rank knows for how long
    group = snapshot.unfinished[0].group.partition("/")[0]
    return snapshot.limits_s.get(group, float("inf"))


def standstill(snapshots: Sequence[Snapshot | None]) -> tuple[object, ...]:
    """Equal for two looks at the ranks between which none of them has moved on."""
    return tuple(s and (s.stage, s.waits, s.place, tuple(s.collectives)) for s in snapshots)


def at(place: Place | None, label: Callable[[str], str]) -> str:
    """A line of code as "Cell In[3], line 2: dist.barrier()"."""
    if place is None:
        return "an unknown line"
    return f"{label(place.filename)}, line {place.line}: {place.text}".removesuffix(": ")


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 1", or "ranks 0, 2 and 3"."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _describe(snapshot: Snapshot | None, label: Callable[[str], str]) -> str:
    if snapshot is None:
        return "did not answer: it is stopped, or in C code that lets no other thread run"
    if snapshot.stage == "is starting":
        return "is starting: it waits until every rank has joined the process group"
    if snapshot.stage == "has returned":
        return "has returned from the function"
    here = at(snapshot.place, label)
    if not snapshot.waits:
        text = f"is in {snapshot.call}, {here}" if snapshot.call else f"is at {here}"
    elif snapshot.call == "backward":
        name = snapshot.unfinished[0].name
        return (
            f"waits in {name} inside backward (DistributedDataParallel averages gradients there), "
            f"{here}"
        )
    else:
        text = f"waits in {snapshot.call or 'wait()'}, {here}"
    begun = [c for c in snapshot.unfinished[:1] if c.place != snapshot.place]
    if begun:
        text += f"; unfinished: the {begun[0].name} begun at {at(begun[0].place, label)}"
    return text


def _who_misses(snapshots: Sequence[Snapshot | None]) -> list[str]:
    """For the oldest unfinished collective of each rank: who is in it, and who never came."""
    waiting: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, snapshot in enumerate(snapshots):
        for collective in (snapshot.unfinished if snapshot else [])[:1]:
            waiting.setdefault((collective.group, collective.number), {})[rank] = collective
    lines = []
    for (_, number), ranks in sorted(waiting.items()):
        first = next(iter(ranks.values()))
        records = _records(snapshots, first)
        missing = _missing(snapshots, first)
        silent = [rank for rank, s in enumerate(snapshots) if s is None]
        absent = f"{ranks_text(missing)} never came" if missing else "no rank is missing"
        if silent:
            absent += f"; nothing is known about {ranks_text(silent)}"
        where = f"collective {number} of {_group_name(first.group)}"
        if not _is_mismatch(records.values()):
            lines.append(f"{first.name}, {where}: {ranks_text(records)} came, {absent}.")
        elif len({c.name for c in records.values()}) > 1:
            calls = "; ".join(f"rank {r} calls {c.name}" for r, c in sorted(records.items()))
            lines.append(f"Mismatch at {where}: {calls}; {absent}.")
        else:
            sizes = "; ".join(f"rank {r} brings {c.tensors}" for r, c in sorted(records.items()))
            lines.append(f"Mismatch in {first.name}, {where}: {sizes}; {absent}.")
    if not any(s is None or s.waits or s.stage == "is starting" for s in snapshots):
        lines.append("No rank waits for another: they may just need more time (timeout_s).")
    return lines


def _records(snapshots: Sequence[Snapshot | None], wanted: Collective) -> dict[int, Collective]:
    """The same collective as every rank that came to it has recorded it, finished or not."""
    return {
        rank: collective
        for rank, snapshot in enumerate(snapshots)
        for collective in (snapshot.collectives if snapshot else [])
        if (collective.group, collective.number) == (wanted.group, wanted.number)
    }


def _is_mismatch(records: Collection[Collective]) -> bool:
    """Whether ranks came to the same collective with what cannot go together."""
    names = {c.name for c in records}
    return len(names) > 1 or (names <= SAME_ELEMENTS and len({c.amounts for c in records}) > 1)


def _missing(snapshots: Sequence[Snapshot | None], wanted: Collective) -> list[int]:
    """Members of the group that have not started that collective."""
    name = wanted.group.partition("/")[0]
    members = {rank for s in snapshots if s for rank in s.members.get(name, [])}
    return [
        rank
        for rank in sorted(members)
        if (snapshot := snapshots[rank]) and snapshot.started(wanted.group) < wanted.number
    ]


def _group_name(group: str) -> str:
    name = group.partition("/")[0]
    return "the default group" if name == "0" else f"group {name}"
