"""Where a rank is, looked up from inside it while its main thread is held up.

It takes two sources. The Python stack of the rank's main thread says where it is now. PyTorch's
flight recorder says which collectives it has started and not finished, those that run beside the
program (``async_op=True``) or below it (DistributedDataParallel in ``backward``) included.
"""

import linecache
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, starmap
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from vgpu.launch.own_code import is_learners, is_library

RECORDER = {"TORCH_FR_BUFFER_SIZE": "1000", "TORCH_FR_CPP_STACK": "0"}
"""Environment that switches the flight recorder on; it counts collectives per group."""

_LATELY = 200
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_DDP = os.path.join(_TORCH, "nn", "parallel", "distributed.py")
_FULLY_SHARD = os.path.join(_DISTRIBUTED, "fsdp", "_fully_shard") + os.sep


@dataclass(frozen=True)
class Place:
    """A line of the learner's own code."""

    filename: str
    line: int
    text: str


@dataclass(frozen=True)
class Collective:
    """One collective as one rank has recorded it."""

    group: str
    """Name of the group and backend: in a group of two backends each counts by itself."""
    number: int
    """Its number among the collectives of the group, from 1: the same on every rank."""
    name: str
    place: Place | None
    tensors: str
    """Sizes and types of what the rank put in."""
    amounts: tuple[tuple[int, str], ...]
    """For each of these tensors its number of elements and their type."""
    finished: bool


@dataclass
class Snapshot:
    """Where one rank is."""

    stage: str
    """"is starting", "runs" or "has returned"."""
    place: Place | None = None
    call: str = ""
    """The function of torch.distributed, or the part of DDP or autograd, that the rank is in."""
    waits: bool = False
    """Whether the rank's main thread is where it can only wait for other ranks."""
    collectives: list[Collective] = field(default_factory=list)
    """What it has started lately, oldest first."""
    members: dict[str, list[int]] = field(default_factory=dict)
    """The ranks of each group that it belongs to."""
    limits_s: dict[str, float] = field(default_factory=dict)
    """When a collective of each group gives up by itself, with an error."""

    @property
    def unfinished(self) -> list[Collective]:
        return [c for c in self.collectives if not c.finished]

    def started(self, group: str) -> int:
        """The number of the last collective that it has started in a group."""
        return max((c.number for c in self.collectives if c.group == group), default=0)


def look(thread: int, stage: str) -> Snapshot:
    """In a rank: where its main thread is."""
    snapshot = Snapshot(stage)
    if dist.is_initialized():
        snapshot.collectives = _recorded()
        for group in c10d._world.pg_map:
            snapshot.members[group.group_name] = dist.get_process_group_ranks(group)
            snapshot.limits_s[group.group_name] = _limit_s(group)
    if stage == "runs":
        stack = _stack(thread)
        snapshot.place = own_place((call.filename, call.line) for call in stack)
        snapshot.call, is_distributed = _call(stack, thread)
        in_wait = snapshot.place is not None and ".wait(" in snapshot.place.text
        below = bool(snapshot.call or in_wait) and bool(snapshot.unfinished)
        snapshot.waits = is_distributed or in_wait or below
    return snapshot


def own_place(frames: Iterable[tuple[str, int]]) -> Place | None:
    """The innermost frame that is neither Python's nor a library's.

    This package counts as a library (an exercise's check, for example) unless nothing else runs.
    """
    found = [frame for frame in frames if not is_library(frame[0])]
    learners = [frame for frame in found if is_learners(frame[0])]
    for filename, line in (*learners, *found)[:1]:
        return Place(filename, line, linecache.getline(filename, line).strip())
    return None


class _Call(NamedTuple):
    filename: str
    line: int
    name: str


_MOST_CALLS = 100
_PLACE = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


def _stack(thread: int) -> list[_Call]:
    """What a thread has called, innermost first, at most 100 calls.

    Whoever holds a frame keeps what its function has in variables when the function has returned:
    tensors would be freed late, and the rank's peak would depend on when somebody looked. So all of
    it happens within one call of C code, during which the thread cannot go on.
    """
    calls: list[tuple[str, int, str]] = []
    with suppress(AttributeError, KeyError):  # None has no f_back; or the thread has ended
        calls.extend(
            map(
                _PLACE,
                accumulate(
                    chain(
                        map(itemgetter(thread), starmap(sys._current_frames, [()])),
                        repeat("f_back", _MOST_CALLS - 1),
                    ),
                    getattr,
                ),
            )
        )
    return [_Call(*call) for call in calls]


def _call(stack: list[_Call], thread: int) -> tuple[str, bool]:
    """What the learner's line has called, and whether that is a function of torch.distributed.

    It is the outermost function below that line which may have to wait for other ranks.
    """
    found, is_distributed = "", False
    for filename, _, name in stack:
        if filename == _DDP:
            part = "construction" if name == "__init__" else "forward"
            found, is_distributed = f"the {part} of DistributedDataParallel", False
        elif name == "_engine_run_backward":
            found, is_distributed = "backward", False
        elif filename.startswith(_FULLY_SHARD):
            found, is_distributed = "a gather or reduction of fully_shard", True
        elif filename.startswith(_DISTRIBUTED) and not filename.endswith("c10d_logger.py"):
            found, is_distributed = name, True
        elif is_learners(filename):
            break
    return found + (_peer(found, thread) if is_distributed else ""), is_distributed


def _limit_s(group: dist.ProcessGroup) -> float:
    limits = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        limit = getattr(options, "_timeout", None)
        limits += [limit.total_seconds()] if limit is not None else []
    return min(limits, default=float("inf"))


def _peer(name: str, thread: int) -> str:
    """The other side of a send or recv, as " to rank 1" or " from rank 0"."""
    kind, word = {"send": ("dst", "to"), "recv": ("src", "from")}.get(name, ("", ""))
    if not kind:
        return ""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    if frame is None:  # it has ended meanwhile
        return ""
    peer = frame.f_locals.get(kind)
    peer = frame.f_locals.get(f"group_{kind}") if peer is None else peer
    return f" {word} " + ("any rank" if peer is None else f"rank {peer}")


def _recorded() -> list[Collective]:
    """What the flight recorder has, oldest first; nothing if this torch has none for gloo."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and (name == "_dump_fr_trace" or torch.cuda.is_initialized()):
            entries += pickle.loads(dump()).get("entries", [])
    found = []
    for entry in entries[-_LATELY:]:
        if not entry["is_p2p"]:
            backend, _, operation = entry["profiling_name"].partition(":")
            frames = [(f["filename"], f["line"]) for f in entry.get("frames", [])]
            sizes, types = entry["input_sizes"], entry["input_dtypes"]
            found.append(
                Collective(
                    group=f"{entry['process_group'][0]}/{backend}",
                    number=entry["collective_seq_id"],
                    name=operation,
                    place=own_place(frames),
                    tensors=f"{sizes} {', '.join(types)}",
                    amounts=tuple(zip(map(math.prod, sizes), types, strict=True)),
                    finished=entry["retired"] or entry["state"] == "completed",
                )
            )
    return found
