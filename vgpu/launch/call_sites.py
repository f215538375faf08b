"""Finds out where a rank is, from within its process, while its main thread is blocked.

There are two sources. The Python stack of the rank's main thread says where the thread is now.
PyTorch's flight recorder says which collectives the rank has started and not finished, including
those that run in the background (``async_op=True``) or that PyTorch itself calls
(DistributedDataParallel in ``backward``).
"""

import linecache
import math
import os
import pickle
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
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
    """Its number among the collectives of the group, from 1: the same on every rank."""
    name: str
    call_site: CallSite | None
    tensors: str
    """Sizes and dtypes of the rank's inputs."""
    numels: tuple[tuple[int, str], ...]
    """The number of elements and the dtype of each of these tensors."""
    finished: bool


class Message(NamedTuple):
    """The messages with one tag that one rank of a group sends to another; ranks are global."""

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
    """The seconds after which each group's collectives time out on their own, with an error."""
    sent: Counter[Message] = field(default_factory=Counter)
    """How many sends the rank has started; the flight recorder doesn't record gloo's messages."""
    received: Counter[Message] = field(default_factory=Counter)
    message: Message | None = None
    """What the rank waits for in a blocking send or recv."""
    groups_made: int = 0
    new_group: list[int] = field(default_factory=list)
    """The ranks of the group that it's creating in new_group, which waits for all ranks."""

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
        for group in c10d._world.pg_map:
            state.members[group.group_name] = dist.get_process_group_ranks(group)
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
        return filename.startswith("<frozen")  # any other such name is code that was typed in
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
    # <string> is what python -c runs: it starts a program and calls into its files.
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
    if not argument:
        return ""
    variables = _variables(function, thread)
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
