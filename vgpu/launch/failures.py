"""What ``launch.run`` raises if there are no results: which rank failed, where, and why."""

import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from vgpu.launch import hangs
from vgpu.launch.hangs import RankState, user_call_site
from vgpu.launch.processes import RankProcess
from vgpu.launch.rank import Failure, Result, crash_path
from vgpu.units import format_bytes, format_seconds

RETURN_WHAT = "Return tensors, numbers, figures, state_dicts or model.module."

# gloo's and NCCL's errors on a rank that lost its peer: the failure to report is the peer's.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Connection refused"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class LaunchError(RuntimeError):
    """``launch.run`` has no results; the message says which rank failed, where and why."""


class RankRaised(LaunchError):
    """A rank raised an exception, called ``sys.exit``, or returned something that can't be sent.

    ``__cause__`` is the rank's own exception, if it can be pickled.
    """


class RankDied(LaunchError):
    """A rank's process was killed by a signal, or exited without raising an exception."""


class RanksHung(LaunchError):
    """Some ranks didn't return within the time limit, or never would have."""


def has_failed(rank: RankProcess) -> bool:
    """Whether a rank can no longer return a result."""
    return rank.died or isinstance(rank.outcome, Failure)


def has_lost_peer(rank: RankProcess) -> bool:
    """Whether a rank failed only because it lost another rank."""
    failure = rank.outcome
    return isinstance(failure, Failure) and bool(_LOST_PEER.search(failure.summary))


def failure_error(ranks: Sequence[RankProcess], scratch: Path) -> LaunchError:
    """Return the error for the first rank that failed on its own."""
    failed = sorted(filter(has_failed, ranks), key=lambda r: (has_lost_peer(r), _failed_ns(r)))
    if failed[0].died:
        return _died(failed[0], ranks, scratch)
    # If multiple ranks raised the same error, it's random which was first: report the lowest rank.
    same = [r for r in failed if _summary(r) == _summary(failed[0])]
    first = min(same, key=lambda r: r.rank)
    others = [r for r in failed if r is not first]
    assert isinstance(first.outcome, Failure)
    return _raised(first.rank, first.outcome, others, len(ranks))


def hang_error(
    ranks: Sequence[RankProcess], states: Sequence[RankState | None], time_s: float, certain: bool
) -> RanksHung:
    """Return the error for ranks that didn't return; ``certain`` if they never would have."""
    late = [rank for rank in ranks if not isinstance(rank.outcome, Result)]
    never = " and never would have" if certain else ""
    return RanksHung(
        f"after {format_seconds(time_s)}, {len(late)} of {len(ranks)} ranks had not returned"
        f"{never}; all were stopped.\n{hangs.explain(states, name_file)}"
    )


def name_file(filename: str) -> str:
    """Return the notebook's name for a cell, such as "Cell In[3]"; otherwise the file's name."""
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
        "exited": f"{rank} called sys.exit before it returned: {failure.summary}",
        "unreadable": f"{rank} couldn't unpickle the function sent to it: {failure.summary}",
        "unsendable": (
            f"{rank} returned something that can't be sent back through a file in "
            f"{tempfile.gettempdir()}: "
            f"{failure.summary}. {RETURN_WHAT}"
        ),
    }[failure.kind]
    notes = []
    same = [r.rank for r in others if _summary(r) == failure.summary]
    if same:
        notes.append(f"The same happened on {hangs.ranks_text(same)}.")
    for other in others:
        if other.rank not in same and not has_lost_peer(other):
            notes.append(f"Then rank {other.rank} failed: {_summary(other)}")
    if len(others) + 1 < world:
        notes.append("The other ranks were stopped.")
    if "at start of device string: vgpu" in failure.summary:
        notes.append(
            'The ranks have no virtual GPUs: pass a model, as in launch.run(..., gpu="H100").'
        )
    trace = "" if failure.kind == "unsendable" else _name_cells(failure.traceback)
    error = RankRaised("\n\n".join(filter(None, [text, trace, "\n".join(notes)])))
    if failure.exception is not None:
        with suppress(Exception):  # unpickling may fail in this process; the error's text is above
            error.__cause__ = pickle.loads(failure.exception)
    return error


def _summary(rank: RankProcess) -> str:
    return rank.outcome.summary if isinstance(rank.outcome, Failure) else "its process died"


def _name_cells(text: str) -> str:
    def renamed(frame: re.Match[str]) -> str:
        cell = _cell_name(frame[1])
        return f"{cell}, line {frame[2]}" if cell else frame[0]

    return _FRAME.sub(renamed, text)


def _died(rank: RankProcess, ranks: Sequence[RankProcess], scratch: Path) -> RankDied:
    code, world = rank.exit_code, len(ranks)
    name = f"rank {rank.rank} of {world}"
    if code is not None and code < 0:
        known = {number.value: number.name for number in signal.Signals}
        text = f"{name} was killed by signal {known.get(-code, -code)}."
    else:
        text = f"{name} exited with code {code} before it returned (os._exit, or C code)."
    if code == -getattr(signal, "SIGKILL", 9):
        text += (
            f" The system does this when memory runs out: {world} ranks hold {world} copies of "
            f"everything they use, and this machine now has "
            f"{format_bytes(psutil.virtual_memory().available)} free. Try fewer ranks or less data."
        )
    elif code in (-getattr(signal, "SIGSEGV", 11), -getattr(signal, "SIGBUS", 7)):
        text += " C code accessed memory that it doesn't own, or /dev/shm is full."
    text += _crash_line(crash_path(scratch, rank.rank))
    text = "\n".join([text, *hangs.mismatches([each.state for each in ranks])])
    return RankDied(text + "\nThe other ranks were stopped." if world > 1 else text)


def _crash_line(path: Path) -> str:
    """Return the user's line, from what faulthandler wrote when the process crashed."""
    text = path.read_text(errors="replace") if path.exists() else ""
    _, _, current = text.partition("Current thread")
    frames = [(name, int(line)) for name, line in _FRAME.findall(current.partition("\n\n")[0])]
    call_site = user_call_site(frames)
    return f"\nIt was at {hangs.at(call_site, name_file)}." if call_site else ""
