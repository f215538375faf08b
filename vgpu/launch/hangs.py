"""Finds where each rank is, and explains why ranks hang."""

import linecache
import math
import os
import pickle
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain, repeat, starmap
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from vgpu.collectives.table import SAME_ELEMENTS

# Where a rank is, as determined in its own process while its main thread is blocked
#
# There are two sources. The Python stack of the rank's main thread says where the thread is now.
# PyTorch's flight recorder says which collectives the rank has started and not finished, including
# those that run in the background (``async_op=True``) or that PyTorch itself calls
# (DistributedDataParallel in ``backward``).


RECORDER = {"TORCH_FR_BUFFER_SIZE": "1000", "TORCH_FR_CPP_STACK": "0"}
"""Environment variables that turn on the flight recorder; it counts collectives per group."""

_LAST_COLLECTIVES = 200
_MAX_FRAMES = 100
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_DDP = os.path.join(_TORCH, "nn", "parallel", "distributed.py")
_FULLY_SHARD = os.path.join(_DISTRIBUTED, "fsdp", "_fully_shard") + os.sep

_INSTALLED = {"site-packages", "dist-packages"}
# torch is listed because a build from source is imported from where it was built.
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
    Path(torch.__file__).resolve().parent,
    Path(__file__).resolve().parents[1],
)


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code."""

    filename: str
    line: int
    text: str


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective, as recorded by one rank's flight recorder."""

    group: str
    """The group and backend: in a group with two backends, each counts its own collectives."""
    number: int
    """Its number among the group's collectives, starting at 1: the same on every rank."""
    name: str
    call_site: CallSite | None
    tensors: str
    """Sizes and dtypes of the rank's inputs."""
    numels: tuple[tuple[int, str], ...]
    """The number of elements and the dtype of each of the rank's inputs."""
    finished: bool


class Message(NamedTuple):
    """Messages with the same tag from one rank of a group to another; ranks are global."""

    group: str
    source: int
    """-1 for a receive from any rank."""
    target: int
    tag: int


@dataclass
class RankState:
    """Where one rank is."""

    stage: str
    """"is starting", "runs", "has returned" or, for a stopped process, "is stopped"."""
    call_site: CallSite | None = None
    call: str = ""
    """The torch.distributed function, or the part of DDP or autograd, that the rank is in."""
    waits: bool = False
    """Whether the rank's main thread can do nothing but wait for other ranks."""
    collectives: list[CollectiveRecord] = field(default_factory=list)
    """Collectives that the rank started recently, oldest first."""
    members: dict[str, list[int]] = field(default_factory=dict)
    """The ranks of each group that the rank belongs to."""
    timeouts_s: dict[str, float] = field(default_factory=dict)
    """Each group's timeout in seconds, after which its collectives raise an error on their own."""
    sent: Counter[Message] = field(default_factory=Counter)
    """How many sends the rank has started; the flight recorder doesn't record gloo's messages."""
    received: Counter[Message] = field(default_factory=Counter)
    message: Message | None = None
    """What the rank is waiting for in a blocking send or recv."""
    groups_made: int = 0
    new_group: list[int] = field(default_factory=list)
    """The ranks of the group that the rank is creating in new_group, which waits for all ranks."""

    @property
    def unfinished(self) -> list[CollectiveRecord]:
        return [c for c in self.collectives if not c.finished]

    def last_number(self, group: str) -> int:
        """Return the number of the last collective that the rank started in a group."""
        return max((c.number for c in self.collectives if c.group == group), default=0)


_sent: Counter[Message] = Counter()
_received: Counter[Message] = Counter()
_last_message: Message | None = None


def count_messages() -> None:
    """In a rank, start counting the messages that it sends and receives."""
    plain_send, plain_recv = dist.ProcessGroup.send, dist.ProcessGroup.recv
    plain_recv_any = dist.ProcessGroup.recv_anysource

    def count(counter: Counter[Message], group: Any, source: int, target: int, tag: int) -> None:
        global _last_message
        ranks = [*dist.get_process_group_ranks(group), -1]
        _last_message = Message(str(group.group_name), ranks[source], ranks[target], tag)
        counter[_last_message] += 1

    # The parameters have the same names as torch's.
    def send(group: Any, tensors: Any, dstRank: int, tag: int) -> Any:
        work = plain_send(group, tensors, dstRank, tag)
        count(_sent, group, group.rank(), dstRank, tag)
        return work

    def recv(group: Any, tensors: Any, srcRank: int, tag: int) -> Any:
        work = plain_recv(group, tensors, srcRank, tag)
        count(_received, group, srcRank, group.rank(), tag)
        return work

    def recv_anysource(group: Any, tensors: Any, tag: int) -> Any:
        work = plain_recv_any(group, tensors, tag)
        count(_received, group, -1, group.rank(), tag)
        return work

    for function in (send, recv, recv_anysource):
        setattr(dist.ProcessGroup, function.__name__, function)


def rank_state(thread: int, stage: str) -> RankState:
    """In a rank, return where its main thread is."""
    state = RankState(stage, sent=_sent.copy(), received=_received.copy())
    if dist.is_initialized():
        state.collectives = _flight_records()
        # A copy, since the main thread may be making or destroying groups.
        for group, ranks in c10d._world.pg_group_ranks.copy().items():
            if isinstance(group, dist.ProcessGroup):  # not a placeholder for other ranks' groups
                state.members[group.group_name] = list(ranks)
                state.timeouts_s[group.group_name] = _timeout_s(group)
        state.groups_made = c10d._world.group_count
    if stage == "runs":
        stack = _stack(thread)
        state.call_site = user_call_site((frame.filename, frame.line) for frame in stack)
        state.call, is_distributed = _outermost_call(stack, state.call_site, thread)
        in_wait = state.call_site is not None and ".wait(" in state.call_site.text
        below = bool(state.call or in_wait) and bool(state.unfinished)
        state.waits = is_distributed or in_wait or below
        functions = {frame.function for frame in stack if frame.filename == c10d.__file__}
        if functions & {"send", "recv"}:
            state.message = _last_message
        if "_new_group_with_tag" in functions:
            state.new_group = _variables("_new_group_with_tag", thread).get("ranks") or []
    return state


# Cached: inspecting a rank calls this for thousands of frames, and each call searches folders.
@cache
def is_library(filename: str) -> bool:
    """Whether a frame's file belongs to Python, to an installed package or to vgpu."""
    if filename.startswith("<"):
        return filename.startswith("<frozen")  # any other name in <> is code that was typed in
    path = Path(filename).resolve()
    return not _INSTALLED.isdisjoint(path.parts) or any(map(path.is_relative_to, _LIBRARIES))


def user_call_site(frames: Iterable[tuple[str, int]]) -> CallSite | None:
    """Return the user's line that's running; ``frames`` are (file, line), innermost first.

    This is the innermost line in a notebook cell or, without cells, in a file outside libraries.
    """
    own = [frame for frame in frames if not is_library(frame[0])]
    cells = [frame for frame in own if _is_cell(frame[0])]
    for filename, line in (*cells, *own)[:1]:
        return CallSite(filename, line, linecache.getline(filename, line).strip())
    return None


@cache
def _is_cell(filename: str) -> bool:
    # <string> is code run by python -c, which may start a program and call into its files.
    return filename != "<string>" and not os.path.isfile(filename)


class _Frame(NamedTuple):
    filename: str
    line: int
    function: str


_FRAME_OF = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


def _stack(thread: int) -> list[_Frame]:
    """Return a thread's stack, innermost first, at most 100 frames.

    Holding a frame object keeps a function's variables alive after the function has returned:
    tensors would be freed late, and the rank's peak memory would depend on when the parent asked.
    So everything happens in a single call into C, during which the thread can't continue.
    """
    frames: list[tuple[str, int, str]] = []
    innermost = map(itemgetter(thread), starmap(sys._current_frames, [()]))
    outwards = accumulate(chain(innermost, repeat("f_back", _MAX_FRAMES - 1)), getattr)
    with suppress(AttributeError, KeyError):  # None has no f_back; or the thread has exited
        frames.extend(map(_FRAME_OF, outwards))
    return [_Frame(*frame) for frame in frames]


def _outermost_call(
    stack: list[_Frame], call_site: CallSite | None, thread: int
) -> tuple[str, bool]:
    """Return what the user's line called, and whether that's a torch.distributed function.

    This is the outermost function called from that line that may have to wait for other ranks.
    """
    call, is_distributed = "", False
    for filename, line, function in stack:
        if filename == _DDP:
            part = "constructor" if function == "__init__" else "forward"
            call, is_distributed = f"the {part} of DistributedDataParallel", False
        elif function == "_engine_run_backward":
            call, is_distributed = "backward", False
        elif filename.startswith(_FULLY_SHARD):
            call, is_distributed = "a gather or reduction of fully_shard", True
        elif filename.startswith(_DISTRIBUTED) and not filename.endswith("c10d_logger.py"):
            call, is_distributed = function, True
        elif call_site and (filename, line) == (call_site.filename, call_site.line):
            break
    return call + (_peer(call, thread) if is_distributed else ""), is_distributed


def _timeout_s(group: dist.ProcessGroup) -> float:
    timeouts = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        timeouts += [timeout.total_seconds()] if timeout is not None else []
    return min(timeouts, default=float("inf"))


def _peer(function: str, thread: int) -> str:
    """Return the other side of a send or recv, as " to rank 1" or " from rank 0"."""
    argument, word = {"send": ("dst", "to"), "recv": ("src", "from")}.get(function, ("", ""))
    variables = _variables(function, thread) if argument else {}
    if not variables:
        return ""
    peer = variables.get(argument)
    peer = variables.get(f"group_{argument}") if peer is None else peer
    return f" {word} " + ("any rank" if peer is None else f"rank {peer}")


def _variables(function: str, thread: int) -> dict[str, Any]:
    """Return the variables of a function that a thread is in; empty if the thread has exited."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _flight_records() -> list[CollectiveRecord]:
    """Return the flight recorder's entries, oldest first; none if this torch can't record gloo."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and (name == "_dump_fr_trace" or torch.cuda.is_initialized()):
            entries += pickle.loads(dump()).get("entries", [])
    return [_record(entry) for entry in entries[-_LAST_COLLECTIVES:] if not entry["is_p2p"]]


def _record(entry: dict[str, Any]) -> CollectiveRecord:
    backend, _, operation = entry["profiling_name"].partition(":")
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    return CollectiveRecord(
        group=f"{entry['process_group'][0]}/{backend}",
        number=entry["collective_seq_id"],
        name=operation,
        call_site=user_call_site((f["filename"], f["line"]) for f in entry.get("frames", [])),
        tensors=f"{sizes} {', '.join(dtypes)}",
        numels=tuple(zip(map(math.prod, sizes), dtypes, strict=True)),
        finished=entry["retired"] or entry["state"] == "completed",
    )


# What the parent concludes


STOPPED = "is stopped"
"""The stage of a rank whose process was stopped by a signal; it neither runs nor answers."""


def explain(states: Sequence[RankState | None], name_file: Callable[[str], str]) -> str:
    """Return a line for each rank, then lines about which collectives are waiting for which ranks.

    A rank without a state didn't answer. ``name_file`` turns a file name into one that the reader
    knows, such as "Cell In[3]".
    """
    lines = [f"rank {rank} {_describe(state, name_file)}" for rank, state in enumerate(states)]
    return "\n".join(f"  {line}" for line in lines + _explain_collectives(states))


def is_deadlock(states: Sequence[RankState | None], within_s: float = float("inf")) -> bool:
    """Whether no rank can ever continue: each waits for one that's gone, stopped or also waiting.

    It considers collectives (the flight recorder knows which ranks have arrived), blocking ``send``
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
    """Whether a rank is waiting for something that one of ``others`` hasn't started.

    For a collective, it's also true if one of ``others`` is a stopped member, or if the calls don't
    match.
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
    """Return the ranks of a new group that have called new_group fewer times, or are stopped."""
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
        return "is starting: it's waiting for every rank to join the process group"
    if state.stage == "has returned":
        return "has returned from the function"
    here = at(state.call_site, name_file)
    if not state.waits:
        text = f"is in {state.call}, {here}" if state.call else f"is at {here}"
    elif state.call == "backward":
        name = state.unfinished[0].name
        return (
            f"is waiting in {name} inside backward (DistributedDataParallel averages gradients there), "
            f"{here}"
        )
    else:
        text = f"is waiting in {state.call or 'wait()'}, {here}"
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
        records = _records(states, record)
        if _is_mismatch(records.values()):
            continue
        absent = _absent(states, record)
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
        lines.append(f"{what}{'; '.join(sides)}; {_absent(states, record)}.")
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


def _absent(states: Sequence[RankState | None], wanted: CollectiveRecord) -> str:
    missing = _missing(states, wanted)
    return f"{ranks_text(missing)} never arrived" if missing else "no rank is missing"


def _members(states: Sequence[RankState | None], wanted: CollectiveRecord) -> set[int]:
    name = wanted.group.partition("/")[0]
    return {rank for s in states if s for rank in s.members.get(name, [])}


def _group_name(group: str) -> str:
    name = group.partition("/")[0]
    return "the default group" if name == "0" else f"group {name}"
