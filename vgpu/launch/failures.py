"""What ``launch.run`` raises when it has no results: which rank, what went wrong, and where.

Why ranks hang is worked out from where each of them is.
"""

import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from vgpu.collectives.table import SAME_ELEMENTS
from vgpu.launch.call_sites import CallSite, CollectiveRecord, RankState, user_call_site
from vgpu.launch.processes import RankProcess, ranks_text
from vgpu.launch.rank import Failure, Result, crash_path
from vgpu.units import format_bytes, format_seconds

RETURN_WHAT = "Return tensors, numbers, figures, state_dicts or model.module."

# What gloo and NCCL say on a rank that has lost its peer: the failure to report is the peer's.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Connection refused"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class LaunchError(RuntimeError):
    """``launch.run`` has no results to return; the message says which rank, what and where."""


class RankRaised(LaunchError):
    """A rank raised an exception, left through ``sys.exit``, or returned what cannot be sent.

    ``__cause__`` is the rank's own exception if that can be pickled.
    """


class RankDied(LaunchError):
    """A rank's process ended without an exception: by a signal or with an exit code."""


class RanksHung(LaunchError):
    """Not every rank returned within the time limit, or none of them ever would have."""


def has_failed(rank: RankProcess) -> bool:
    """Whether a rank can no longer return a result."""
    return rank.died or isinstance(rank.outcome, Failure)


def has_lost_peer(rank: RankProcess) -> bool:
    """Whether a rank failed only because it lost another one."""
    failure = rank.outcome
    return isinstance(failure, Failure) and bool(_LOST_PEER.search(failure.summary))


def failure_error(ranks: Sequence[RankProcess], scratch: Path) -> LaunchError:
    """The error for the rank that failed first and by itself."""
    failed = sorted(filter(has_failed, ranks), key=lambda r: (has_lost_peer(r), _failed_ns(r)))
    if failed[0].died:
        return _died(failed[0], len(ranks), scratch)
    # If several ranks raised the same, which one was first is chance: report the lowest.
    same = [r for r in failed if _summary(r) == _summary(failed[0])]
    first = min(same, key=lambda r: r.rank)
    others = [r for r in failed if r is not first]
    assert isinstance(first.outcome, Failure)
    return _raised(first.rank, first.outcome, others, len(ranks))


def hang_error(
    ranks: Sequence[RankProcess], states: Sequence[RankState | None], time_s: float, certain: bool
) -> RanksHung:
    """The error for ranks that did not return; ``certain`` if they never would have."""
    late = [rank for rank in ranks if not isinstance(rank.outcome, Result)]
    never = " and never would have" if certain else ""
    return RanksHung(
        f"after {format_seconds(time_s)}, {len(late)} of {len(ranks)} ranks had not returned"
        f"{never}; all were stopped.\n{explain(states)}"
    )


def name_file(filename: str) -> str:
    """A cell by the name that the notebook gives it, such as "Cell In[3]"; else the file's name."""
    return _cell_name(filename) or os.path.basename(filename)


def _cell_name(filename: str) -> str | None:
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    words = shell and shell.compile.format_code_name(filename)
    return " ".join(words) if words else None


def _failed_ns(rank: RankProcess) -> int:
    if isinstance(rank.outcome, Failure):
        return rank.outcome.stamp_ns
    assert rank.ended_ns is not None
    return rank.ended_ns


def _raised(number: int, failure: Failure, others: list[RankProcess], world: int) -> RankRaised:
    rank = f"rank {number} of {world}"
    text = {
        "raised": f"{rank} raised {failure.summary}",
        "exited": f"{rank} left through sys.exit before it returned: {failure.summary}",
        "unreadable": f"{rank} could not rebuild the function that was sent: {failure.summary}",
        "unsendable": (
            f"{rank} returned what cannot be sent back through a file in {tempfile.gettempdir()}: "
            f"{failure.summary}. {RETURN_WHAT}"
        ),
    }[failure.kind]
    notes = []
    same = [r.rank for r in others if _summary(r) == failure.summary]
    if same:
        notes.append(f"The same happened on {ranks_text(same)}.")
    for other in others:
        if other.rank not in same and not has_lost_peer(other):
            notes.append(f"Then rank {other.rank} failed: {_summary(other)}")
    if len(others) + 1 < world:
        notes.append("The other ranks were stopped.")
    trace = "" if failure.kind == "unsendable" else _name_cells(failure.traceback)
    error = RankRaised("\n\n".join(filter(None, [text, trace, "\n".join(notes)])))
    if failure.exception is not None:
        with suppress(Exception):  # it can be rebuilt in the rank but not here; its text is above
            error.__cause__ = pickle.loads(failure.exception)
    return error


def _summary(rank: RankProcess) -> str:
    return rank.outcome.summary if isinstance(rank.outcome, Failure) else "its process died"


def _name_cells(text: str) -> str:
    def renamed(frame: re.Match[str]) -> str:
        cell = _cell_name(frame[1])
        return f"{cell}, line {frame[2]}" if cell else frame[0]

    return _FRAME.sub(renamed, text)


def _died(rank: RankProcess, world: int, scratch: Path) -> RankDied:
    code = rank.exit_code
    name = f"rank {rank.rank} of {world}"
    if code is not None and code < 0:
        known = {number.value: number.name for number in signal.Signals}
        text = f"{name} was ended by the signal {known.get(-code, -code)}."
    else:
        text = f"{name} ended with exit code {code} before it returned (os._exit, or C code)."
    if code == -getattr(signal, "SIGKILL", 9):
        text += (
            f" The system does this when memory runs out: {world} ranks hold {world} copies of "
            f"everything they use, and {format_bytes(psutil.virtual_memory().available)} of this "
            "machine are free now. Try fewer ranks or less data."
        )
    elif code in (-getattr(signal, "SIGSEGV", 11), -getattr(signal, "SIGBUS", 7)):
        text += " C code read or wrote memory that is not its own; /dev/shm may also be full."
    text += _crash_line(crash_path(scratch, rank.rank))
    return RankDied(text + "\nThe other ranks were stopped." if world > 1 else text)


def _crash_line(path: Path) -> str:
    """The user's line in what faulthandler wrote when the process crashed."""
    text = path.read_text(errors="replace") if path.exists() else ""
    _, _, current = text.partition("Current thread")
    frames = [(name, int(line)) for name, line in _FRAME.findall(current.partition("\n\n")[0])]
    call_site = user_call_site(frames)
    return f"\nIt was at {_at(call_site)}." if call_site else ""


# Why ranks hang


def explain(states: Sequence[RankState | None]) -> str:
    """One line for each rank, then which collectives wait for whom.

    A rank without a state did not answer.
    """
    lines = [f"rank {rank} {_describe(state)}" for rank, state in enumerate(states)]
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


def _at(call_site: CallSite | None) -> str:
    """A line of code as "Cell In[3], line 2: dist.barrier()"."""
    if call_site is None:
        return "an unknown line"
    file = name_file(call_site.filename)
    return f"{file}, line {call_site.line}: {call_site.text}".removesuffix(": ")


def _times_out_in_s(state: RankState) -> float:
    """Seconds, counted from its beginning, after which a rank's wait times out."""
    if state.call_site and re.search(r"\.wait\([^)]", state.call_site.text):
        return 0.0  # work.wait(timeout): only the rank knows how long that is
    group = state.unfinished[0].group.partition("/")[0]
    return state.timeouts_s.get(group, float("inf"))


def _describe(state: RankState | None) -> str:
    if state is None:
        return "did not answer: it is stopped, or in C code that lets no other thread run"
    if state.stage == "is starting":
        return "is starting: it waits until every rank has joined the process group"
    if state.stage == "has returned":
        return "has returned from the function"
    here = _at(state.call_site)
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
        begun = _at(collective.call_site)
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
