"""Why ranks hang, worked out from where each of them is."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from vgpu.collectives.table import SAME_ELEMENTS
from vgpu.launch.call_sites import CallSite, CollectiveRecord, RankState


def explain(states: Sequence[RankState | None], name_file: Callable[[str], str]) -> str:
    """One line for each rank, then which collectives wait for whom.

    A rank without a state did not answer. ``name_file`` turns a file name into what the reader
    knows, such as "Cell In[3]".
    """
    lines = [f"rank {rank} {_describe(state, name_file)}" for rank, state in enumerate(states)]
    return "\n".join(f"  {line}" for line in lines + _explain_collectives(states))


def is_deadlock(states: Sequence[RankState | None], within_s: float = float("inf")) -> bool:
    """Whether no rank can ever go on: each waits for one that has returned or waits in turn.

    Only collectives count, since the flight recorder knows for them who has come. The answer is
    certain if no rank has made progress while the states were taken. A rank whose collective times
    out within ``within_s`` seconds is no part of a deadlock: it will raise an error of its own.
    """
    if any(s and s.unfinished and _times_out_in_s(s) < within_s for s in states):
        return False
    waiting = {rank for rank, s in enumerate(states) if s and s.waits and s.unfinished}
    returned = {rank for rank, s in enumerate(states) if s and s.stage == "has returned"}
    if not waiting or len(waiting) + len(returned) < len(states):
        return False
    while True:
        stuck = set()
        for rank in waiting:
            state = states[rank]
            assert state is not None
            oldest = state.unfinished[0]
            awaited = set(_missing(states, oldest)) & (waiting | returned)
            if awaited or _is_mismatch(_records(states, oldest).values()):
                stuck.add(rank)
        if stuck == waiting:
            return bool(waiting)
        waiting = stuck


def progress(states: Sequence[RankState | None]) -> tuple[object, ...]:
    """Equal for two looks at the ranks between which none of them has gone on."""
    return tuple(s and (s.stage, s.waits, s.call_site, tuple(s.collectives)) for s in states)


def at(call_site: CallSite | None, name_file: Callable[[str], str]) -> str:
    """A line of code as "Cell In[3], line 2: dist.barrier()"."""
    if call_site is None:
        return "an unknown line"
    file = name_file(call_site.filename)
    return f"{file}, line {call_site.line}: {call_site.text}".removesuffix(": ")


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 1", or "ranks 0, 2 and 3"."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _times_out_in_s(state: RankState) -> float:
    """Seconds, counted from its beginning, after which a rank's wait times out."""
    if state.call_site and re.search(r"\.wait\([^)]", state.call_site.text):
        return 0.0  # work.wait(timeout): only the rank knows how long that is
    group = state.unfinished[0].group.partition("/")[0]
    return state.timeouts_s.get(group, float("inf"))


def _describe(state: RankState | None, name_file: Callable[[str], str]) -> str:
    if state is None:
        return "did not answer: it is stopped, or in C code that lets no other thread run"
    if state.stage == "is starting":
        return "is starting: it waits until every rank has joined the process group"
    if state.stage == "has returned":
        return "has returned from the function"
    here = at(state.call_site, name_file)
    if not state.waits:
        text = f"is in {state.call}, {here}" if state.call else f"is at {here}"
    elif state.call == "backward":
        name = state.unfinished[0].name
        return (
            f"waits in {name} inside backward (DistributedDataParallel averages gradients there), "
            f"{here}"
        )
    else:
        text = f"waits in {state.call or 'wait()'}, {here}"
    elsewhere = [c for c in state.unfinished[:1] if c.call_site != state.call_site]
    for collective in elsewhere:
        begun = at(collective.call_site, name_file)
        text += f"; unfinished: the {collective.name} begun at {begun}"
    return text


def _explain_collectives(states: Sequence[RankState | None]) -> list[str]:
    """For the oldest unfinished collective of each rank: who is in it, and who never came."""
    oldest: dict[tuple[str, int], CollectiveRecord] = {}
    for state in states:
        for record in (state.unfinished if state else [])[:1]:
            oldest.setdefault((record.group, record.number), record)
    silent = [rank for rank, state in enumerate(states) if state is None]
    lines = []
    for (_, number), record in sorted(oldest.items()):
        records = _records(states, record)
        missing = _missing(states, record)
        absent = f"{ranks_text(missing)} never came" if missing else "no rank is missing"
        if silent:
            absent += f"; nothing is known about {ranks_text(silent)}"
        where = f"collective {number} of {_group_name(record.group)}"
        if not _is_mismatch(records.values()):
            lines.append(f"{record.name}, {where}: {ranks_text(records)} came, {absent}.")
        elif len({c.name for c in records.values()}) > 1:
            calls = "; ".join(f"rank {r} calls {c.name}" for r, c in sorted(records.items()))
            lines.append(f"Mismatch at {where}: {calls}; {absent}.")
        else:
            sizes = "; ".join(f"rank {r} brings {c.tensors}" for r, c in sorted(records.items()))
            lines.append(f"Mismatch in {record.name}, {where}: {sizes}; {absent}.")
    if not any(s is None or s.waits or s.stage == "is starting" for s in states):
        lines.append("No rank waits for another: they may just need more time (timeout_s).")
    return lines


def _records(
    states: Sequence[RankState | None], wanted: CollectiveRecord
) -> dict[int, CollectiveRecord]:
    """The same collective as every rank that came to it has recorded it, finished or not."""
    return {
        rank: record
        for rank, state in enumerate(states)
        for record in (state.collectives if state else [])
        if (record.group, record.number) == (wanted.group, wanted.number)
    }


def _is_mismatch(records: Collection[CollectiveRecord]) -> bool:
    """Whether ranks came to the same collective with what cannot go together."""
    names = {c.name for c in records}
    return len(names) > 1 or (names <= SAME_ELEMENTS and len({c.numels for c in records}) > 1)


def _missing(states: Sequence[RankState | None], wanted: CollectiveRecord) -> list[int]:
    """Members of the group that have not started that collective."""
    name = wanted.group.partition("/")[0]
    members = {rank for s in states if s for rank in s.members.get(name, [])}
    return [
        rank
        for rank in sorted(members)
        if (state := states[rank]) and state.last_number(wanted.group) < wanted.number
    ]


def _group_name(group: str) -> str:
    name = group.partition("/")[0]
    return "the default group" if name == "0" else f"group {name}"
