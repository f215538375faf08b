"""What went wrong on a rank, as an error that says which rank, what and where."""

import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vgpu.launch import call_sites as places
from vgpu.launch import hangs
from vgpu.launch.call_sites import Snapshot
from vgpu.launch.errors import LaunchError, RankDied, RankRaised, RanksHung
from vgpu.launch.rank import Failure, Result, crash_path
from vgpu.launch.team import Member
from vgpu.units import format_bytes, format_seconds

# What gloo and NCCL say on a rank that has lost its peer: the fault to report is the peer's.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Connection refused"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def failed(member: Member) -> bool:
    """Whether a rank can no longer return a result."""
    return member.died or isinstance(member.outcome, Failure)


def is_consequence(member: Member) -> bool:
    """Whether a rank failed only because it lost another one."""
    outcome = member.outcome
    return isinstance(outcome, Failure) and bool(_LOST_PEER.search(outcome.summary))


def fault(members: Sequence[Member], scratch: Path) -> LaunchError:
    """The error for the rank that failed first and by itself."""
    at_fault = sorted(filter(failed, members), key=lambda m: (is_consequence(m), _when(m)))
    if at_fault[0].died:
        return _died(at_fault[0], len(members), scratch)
    # If several ranks raised the same, which one was first is chance: report the lowest.
    same = [m for m in at_fault if _summary(m) == _summary(at_fault[0])]
    first = min(same, key=lambda m: m.rank)
    others = [m for m in at_fault if m is not first]
    assert isinstance(first.outcome, Failure)
    return _raised(first, first.outcome, others, len(members))


def hang(
    members: Sequence[Member], snapshots: Sequence[Snapshot | None], time_s: float, certain: bool
) -> RanksHung:
    """The error for ranks that did not return; ``certain`` if they never would have."""
    late = [m.rank for m in members if not isinstance(m.outcome, Result)]
    never = " and never would have" if certain else ""
    return RanksHung(
        f"after {format_seconds(time_s)}, {len(late)} of {len(members)} ranks had not returned"
        f"{never}; all were stopped.\n{hangs.explain(snapshots, label)}"
    )


def label(filename: str) -> str:
    """A cell by the name that the notebook gives it, such as "Cell In[3]"; else the file's name."""
    named = _cell(filename)
    return named or os.path.basename(filename)


def _cell(filename: str) -> str | None:
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    named = shell and shell.compile.format_code_name(filename)
    return " ".join(named) if named else None


def _when(member: Member) -> int:
    if isinstance(member.outcome, Failure):
        return member.outcome.stamp_ns
    assert member.ended_ns is not None
    return member.ended_ns


def _raised(member: Member, failure: Failure, others: list[Member], world: int) -> RankRaised:
    rank = f"rank {member.rank} of {world}"
    text = {
        "raised": f"{rank} raised {failure.summary}",
        "exited": f"{rank} left through sys.exit before it returned: {failure.summary}",
        "unreadable": f"{rank} could not rebuild the function that was sent: {failure.summary}",
        "unpicklable": (
            f"{rank} returned what cannot be sent back: {failure.summary}. "
            "Return tensors, numbers, figures, state_dicts or model.module."
        ),
        "unwritten": (
            f"{rank} could not write what it returned: {failure.summary}. It goes through a file "
            f"in {tempfile.gettempdir()}; the environment variable TMPDIR names another folder."
        ),
    }[failure.kind]
    notes = []
    same = [m.rank for m in others if _summary(m) == failure.summary]
    if same:
        notes.append(f"The same happened on {hangs.ranks_text(same)}.")
    for other in others:
        if other.rank not in same and not is_consequence(other):
            notes.append(f"Then rank {other.rank} failed: {_summary(other)}")
    if len(others) + 1 < world:
        notes.append("The other ranks were stopped.")
    trace = "" if failure.kind in ("unpicklable", "unwritten") else _with_cells(failure.traceback)
    error = RankRaised("\n\n".join(filter(None, [text, trace, "\n".join(notes)])))
    error.__cause__ = _exception(failure)
    return error


def _exception(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        return pickle.loads(failure.exception)
    except Exception:
        # It can be rebuilt in the rank but not here; its text is in the message.
        return None


def _summary(member: Member) -> str:
    if isinstance(member.outcome, Failure):
        return member.outcome.summary
    return "its process died"


def _with_cells(text: str) -> str:
    def renamed(found: re.Match[str]) -> str:
        cell = _cell(found[1])
        return f"{cell}, line {found[2]}" if cell else found[0]

    return _FRAME.sub(renamed, text)


def _died(member: Member, world: int, scratch: Path) -> RankDied:
    code = member.exit_code
    rank = f"rank {member.rank} of {world}"
    if code is not None and code < 0:
        text = f"{rank} was ended by the signal {_signal_name(-code)}."
    else:
        text = f"{rank} ended with exit code {code} before it returned (os._exit, or C code)."
    if code == -getattr(signal, "SIGKILL", 9):
        text += (
            f" The system does this when memory runs out: {world} ranks hold {world} copies of "
            f"everything they use, and {_free_memory()} free now. Try fewer ranks or less data."
        )
    elif code in (-getattr(signal, "SIGSEGV", 11), -getattr(signal, "SIGBUS", 7)):
        text += " C code read or wrote memory that is not its own; /dev/shm may also be full."
    place = _crash_place(crash_path(scratch, member.rank))
    if place:
        text += f"\nIt was at {place}."
    return RankDied(text + "\nThe other ranks were stopped." if world > 1 else text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _free_memory() -> str:
    names = getattr(os, "sysconf_names", {})
    if "SC_AVPHYS_PAGES" not in names:
        return "an unknown amount is"
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{format_bytes(free_bytes)} of this machine are"


def _crash_place(path: Path) -> str:
    """The learner's line in what faulthandler wrote when the process crashed."""
    text = path.read_text(errors="replace") if path.exists() else ""
    _, _, current = text.partition("Current thread")
    frames = [(name, int(line)) for name, line in _FRAME.findall(current.partition("\n\n")[0])]
    place = places.own_place(frames)
    return hangs.at(place, label) if place else ""
