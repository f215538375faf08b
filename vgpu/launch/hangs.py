"""Explains why ranks hang, based on where each of them is."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from vgpu.collectives.table import SAME_ELEMENTS
from vgpu.launch.call_sites import CallSite, CollectiveRecord, RankState

STOPPED = "is stopped"
"""The stage of a rank whose process was stopped by a signal; it neither runs nor answers."""


def explain(states: Sequence[RankState | None], name_file: Callable[[str], str]) -> str:
    """Return a line for each rank, then lines about which collectives wait for which ranks.

    A rank without a state didn't answer. ``name_file`` turns a file name into one that the reader
    knows, such as "Cell In[3]".
    """
    lines = [f"rank {rank} {_describe(state, name_file)}" for rank, state in enumerate(states)]
    return "\n".join(f"  {line}" for line in lines + _explain_collectives(states))


def is_deadlock(states: Sequence[RankState | None], within_s: float = float("inf")) -> bool:
    """Whether no rank can ever continue: each waits for one that returned, is stopped or waits too.

    It considers collectives, for which the flight recorder knows who has arrived, blocking ``send``
    and ``recv``, and ``new_group``. The answer is certain if no rank made progress while the states
    were collected. A rank whose collective times out within ``within_s`` seconds isn't part of a
    deadlock: it will raise its own error.
    """
    if any(s and _times_out_in_s(s) < within_s for s in states):
        return False
    waiting = {rank for rank, s in enumerate(states) if s and s.waits}
    gone = {rank for rank, s in enumerate(states) if s and s.stage in ("has returned", STOPPED)}
    if not waiting or len(waiting) + len(gone) < len(states):
        return False
    while True:
        stuck = {rank for rank in waiting if _cannot_go_on(states, rank, waiting | gone)}
        if stuck == waiting:
            return bool(waiting)
        waiting = stuck


def _cannot_go_on(states: Sequence[RankState | None], rank: int, others: set[int]) -> bool:
    """Whether a rank waits for something that one of ``others`` hasn't started.

    For a collective, also true if one of ``others`` is a stopped member, or the calls don't match.
    """
    state = states[rank]
    assert state is not None
    if state.message is not None:
        return bool(_missing_peer(states, rank) & others)
    if state.new_group:
        return bool(_missing_in_new_group(states, state) & others)
    if not state.unfinished:
        return False
    oldest = state.unfinished[0]
    stopped = {r for r in _members(states, oldest) if (s := states[r]) and s.stage == STOPPED}
    awaited = stopped.union(_missing(states, oldest)) & others
    return bool(awaited) or _is_mismatch(_records(states, oldest).values())


def _missing_peer(states: Sequence[RankState | None], rank: int) -> set[int]:
    """Return the peer of a rank's awaited message, if the peer has started fewer such messages."""
    state = states[rank]
    assert state is not None and state.message is not None
    message = state.message
    any_source = message._replace(source=-1)
    receives = message.target == rank
    other = message.source if receives else message.target
    peer = states[other] if message != any_source else None
    if peer is None:
        return set()
    if receives:
        missing = peer.sent[message] < state.received[message]
    else:
        missing = peer.received[message] + peer.received[any_source] < state.sent[message]
    return {other} if missing else set()


def _missing_in_new_group(states: Sequence[RankState | None], state: RankState) -> set[int]:
    """Return the ranks of a new group that called new_group less often, or are stopped."""
    return {
        rank
        for rank in state.new_group
        if (other := states[rank])
        and other.new_group != state.new_group
        and (other.groups_made < state.groups_made or other.stage == STOPPED)
    }


def progress(states: Sequence[RankState | None]) -> tuple[object, ...]:
    """Return a fingerprint of the ranks' states that stays the same if no rank makes progress."""
    return tuple(s and (s.stage, s.waits, s.call_site, tuple(s.collectives)) for s in states)


def at(call_site: CallSite | None, name_file: Callable[[str], str]) -> str:
    """Format a line of code as "Cell In[3], line 2: dist.barrier()"."""
    if call_site is None:
        return "an unknown line"
    file = name_file(call_site.filename)
    return f"{file}, line {call_site.line}: {call_site.text}".removesuffix(": ")


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks as "rank 1" or "ranks 0, 2 and 3"."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _times_out_in_s(state: RankState) -> float:
    """Return the seconds from the start of a rank's wait to its timeout."""
    if not (state.message or state.unfinished):
        return float("inf")
    if state.call_site and re.search(r"\.wait\([^)]", state.call_site.text):
        return 0.0  # work.wait(timeout): only the rank knows the timeout
    group = state.message.group if state.message else state.unfinished[0].group.partition("/")[0]
    return state.timeouts_s.get(group, float("inf"))


def _describe(state: RankState | None, name_file: Callable[[str], str]) -> str:
    if state is None:
        return "did not answer: it is stopped, or in C code that holds the GIL"
    if state.stage == STOPPED:
        return "is stopped, for example by SIGSTOP"
    if state.stage == "is starting":
        return "is starting: it's waiting until every rank has joined the process group"
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
        started = at(collective.call_site, name_file)
        text += f"; unfinished: the {collective.name} started at {started}"
    return text


def _explain_collectives(states: Sequence[RankState | None]) -> list[str]:
    """Say which ranks arrived at each rank's oldest unfinished collective, and which didn't."""
    silent = [rank for rank, s in enumerate(states) if s is None or s.stage == STOPPED]
    lines = mismatches(states)
    for record in _oldest(states):
        records, missing = _records(states, record), _missing(states, record)
        if _is_mismatch(records.values()):
            continue
        absent = f"{ranks_text(missing)} never arrived" if missing else "no rank is missing"
        if silent:
            absent += f"; nothing is known about {ranks_text(silent)}"
        lines.append(f"{record.name}, {_which(record)}: {ranks_text(records)} arrived, {absent}.")
    for state in states:
        if state and state.new_group and (absentees := _missing_in_new_group(states, state)):
            here = [r for r, s in enumerate(states) if s and s.new_group == state.new_group]
            line = (
                f"new_group({state.new_group}): {ranks_text(here)} arrived, "
                f"{ranks_text(absentees)} never arrived; every rank must call it, whether or not "
                "it is a member."
            )
            lines.extend([] if line in lines else [line])
    if not any(s is None or s.waits or s.stage in ("is starting", STOPPED) for s in states):
        lines.append("No rank is waiting for another: they may just need more time (timeout_s).")
    return lines


def mismatches(states: Sequence[RankState | None]) -> list[str]:
    """Describe mismatches in unfinished collectives: names or inputs that differ among ranks."""
    lines = []
    for record in _oldest(states):
        records = _records(states, record)
        if not _is_mismatch(records.values()):
            continue
        if len({each.name for each in records.values()}) > 1:
            what = f"Mismatch at {_which(record)}: "
            sides = [f"rank {r} calls {each.name}" for r, each in sorted(records.items())]
        else:
            what = f"Mismatch in {record.name}, {_which(record)}: "
            sides = [f"rank {r} passes {each.tensors}" for r, each in sorted(records.items())]
        missing = _missing(states, record)
        absent = f"{ranks_text(missing)} never arrived" if missing else "no rank is missing"
        lines.append(f"{what}{'; '.join(sides)}; {absent}.")
    return lines


def _oldest(states: Sequence[RankState | None]) -> list[CollectiveRecord]:
    """Return the oldest unfinished collective of each rank, without duplicates."""
    oldest: dict[tuple[str, int], CollectiveRecord] = {}
    for state in states:
        for record in (state.unfinished if state else [])[:1]:
            oldest.setdefault((record.group, record.number), record)
    return [record for _, record in sorted(oldest.items())]


def _which(record: CollectiveRecord) -> str:
    return f"collective {record.number} of {_group_name(record.group)}"


def _records(
    states: Sequence[RankState | None], wanted: CollectiveRecord
) -> dict[int, CollectiveRecord]:
    """Return the records of a collective from all ranks that have started it, finished or not."""
    return {
        rank: record
        for rank, state in enumerate(states)
        for record in (state.collectives if state else [])
        if (record.group, record.number) == (wanted.group, wanted.number)
    }


def _is_mismatch(records: Collection[CollectiveRecord]) -> bool:
    """Whether the ranks' records of one collective don't match."""
    names = {c.name for c in records}
    return len(names) > 1 or (names <= SAME_ELEMENTS and len({c.numels for c in records}) > 1)


def _missing(states: Sequence[RankState | None], wanted: CollectiveRecord) -> list[int]:
    """Return the members of the group that haven't started the collective, except stopped ranks."""
    return [
        rank
        for rank in sorted(_members(states, wanted))
        if (state := states[rank])
        and state.stage != STOPPED
        and state.last_number(wanted.group) < wanted.number
    ]


def _members(states: Sequence[RankState | None], wanted: CollectiveRecord) -> set[int]:
    name = wanted.group.partition("/")[0]
    return {rank for s in states if s for rank in s.members.get(name, [])}


def _group_name(group: str) -> str:
    name = group.partition("/")[0]
    return "the default group" if name == "0" else f"group {name}"
