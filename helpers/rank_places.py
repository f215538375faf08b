"""Where ranks are when they hang: looked up in each rank, explained by the parent.

Two sources agree on it. The Python stack of the rank's main thread says where it is now. PyTorch's
flight recorder says which collectives it has started and not finished, those that run beside the
program (``async_op=True``) or below it (DistributedDataParallel in ``backward``) included.
"""

import linecache
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

RECORDER = {"TORCH_FR_BUFFER_SIZE": "1000", "TORCH_FR_CPP_STACK": "0"}
"""Environment that switches the flight recorder on; it counts collectives per group."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_DDP = os.path.join(_TORCH, "nn", "parallel", "distributed.py")
_FOREIGN = (
    "<frozen",
    _TORCH,
    *(sysconfig.get_path(p) + os.sep for p in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.join(os.path.dirname(__file__), "worker.py"),
    os.path.join(os.path.dirname(__file__), "rank_"),
)


@dataclass(frozen=True)
class Place:
    """A line of the learner's own code."""

    filename: str
    line: int
    text: str


@dataclass(frozen=True)
class Pending:
    """A collective that a rank has started and not finished."""

    group: str
    number: int
    """Its number among the collectives of the group, from 1: the same on every rank."""
    name: str
    place: Place | None
    shapes: str


@dataclass
class Snapshot:
    """Where one rank is."""

    stage: str
    """"is starting", "runs" or "has returned"."""
    place: Place | None = None
    call: str = ""
    """The function of torch.distributed, or the part of DDP, that the rank is in."""
    pending: list[Pending] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    """The number of the last collective started, by group."""
    members: dict[str, list[int]] = field(default_factory=dict)


def look(thread: int, stage: str) -> Snapshot:
    """In a rank: where its main thread is."""
    stack: list[FrameType] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    places = [(f.f_code.co_filename, f.f_lineno) for f in stack]
    snapshot = Snapshot(stage)
    if stage == "runs":
        snapshot.place = own_place(places)
        snapshot.call = _call(stack)
    if dist.is_initialized():
        for entry in _recorded():
            group = _group_key(entry)
            number = entry["collective_seq_id"]
            if not entry["is_p2p"]:
                snapshot.started[group] = max(number, snapshot.started.get(group, 0))
            if not entry["retired"] and entry["state"] != "completed":
                frames = [(f["filename"], f["line"]) for f in entry.get("frames", [])]
                snapshot.pending.append(
                    Pending(
                        group,
                        number,
                        entry["profiling_name"].rpartition(":")[2],
                        own_place(frames),
                        f"{entry['input_sizes']} {', '.join(entry['input_dtypes'])}",
                    )
                )
        for process_group in c10d._world.pg_map:
            ranks = dist.get_process_group_ranks(process_group)
            snapshot.members[process_group.group_name] = ranks
    return snapshot


def own_place(frames: Iterable[tuple[str, int]]) -> Place | None:
    """The innermost frame that is neither Python's, nor a library's, nor the launcher's."""
    for filename, line in frames:
        if not filename.startswith(_FOREIGN):
            return Place(filename, line, linecache.getline(filename, line).strip())
    return None


def _call(stack: list[FrameType]) -> str:
    """What the learner's line has called: the outermost function that can wait for other ranks."""
    found = ""
    for frame in stack:
        filename, name = frame.f_code.co_filename, frame.f_code.co_name
        if filename == _DDP:
            part = "construction" if name == "__init__" else "forward"
            found = f"the {part} of DistributedDataParallel"
        elif name == "_engine_run_backward":
            found = "backward"
        elif filename.startswith(_DISTRIBUTED) and not filename.endswith("c10d_logger.py"):
            found = name + _peer(name, frame.f_locals)
        elif not filename.startswith(_FOREIGN):
            break
    return found


def _peer(name: str, arguments: dict[str, Any]) -> str:
    for kind, word in (("dst", "to"), ("src", "from")):
        if name in (("send", "isend") if kind == "dst" else ("recv", "irecv")):
            peer = arguments.get(kind)
            peer = arguments.get(f"group_{kind}") if peer is None else peer
            return f" {word} " + ("any rank" if peer is None else f"rank {peer}")
    return ""


def _recorded() -> list[dict[str, Any]]:
    """The entries of the flight recorder, oldest first; none where torch has none for gloo."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, name, None)
        if dump is None or (name == "_dump_nccl_trace" and not torch.cuda.is_initialized()):
            continue
        entries += pickle.loads(dump()).get("entries", [])
    return entries


def _group_key(entry: dict[str, Any]) -> str:
    """Group and backend: in a group of two backends each counts its collectives by itself."""
    backend = entry["profiling_name"].partition(":")[0]
    return f"{entry['process_group'][0]}/{backend}"


def explain(snapshots: list[Snapshot | None], label: Callable[[str], str]) -> str:
    """One line for each rank, then which collectives wait for whom.

    A rank without a snapshot did not answer. ``label`` turns a file name into what the reader
    knows, such as "Cell In[3]".
    """
    lines = [f"  rank {rank} {_describe(s, label)}" for rank, s in enumerate(snapshots)]
    return "\n".join(lines + [f"  {line}" for line in _who_misses(snapshots)])


def _describe(snapshot: Snapshot | None, label: Callable[[str], str]) -> str:
    if snapshot is None:
        return "did not answer: it is stopped, or in C code that lets no other thread run"
    if snapshot.stage == "is starting":
        return "is starting: it waits until every rank has joined the process group"
    if snapshot.stage == "has returned":
        return "has returned from the function"
    here = at(snapshot.place, label)
    first = snapshot.pending[0] if snapshot.pending else None
    if first is None:
        return f"waits in {snapshot.call}, {here}" if snapshot.call else f"is at {here}"
    if snapshot.call == "backward":
        name = f"{first.name} inside backward (DistributedDataParallel averages gradients there)"
        return f"waits in {name}, {here}"
    if snapshot.call and first.place == snapshot.place:
        return f"waits in {snapshot.call}, {here}"
    verb = "waits in wait()" if ".wait(" in getattr(snapshot.place, "text", "") else "is"
    if snapshot.call:
        verb = f"waits in {snapshot.call}"
    return f"{verb} at {here}; unfinished: the {first.name} begun at {at(first.place, label)}"


def at(place: Place | None, label: Callable[[str], str]) -> str:
    if place is None:
        return "an unknown line"
    return f"{label(place.filename)}, line {place.line}: {place.text}".rstrip(": ")


def _who_misses(snapshots: list[Snapshot | None]) -> list[str]:
    """For the oldest unfinished collective of each rank: who is in it, and who never came."""
    waiting: dict[tuple[str, int], dict[int, Pending]] = {}
    for rank, snapshot in enumerate(snapshots):
        for pending in (snapshot.pending if snapshot else [])[:1]:
            waiting.setdefault((pending.group, pending.number), {})[rank] = pending
    lines = []
    for (group, number), ranks in sorted(waiting.items()):
        names = {pending.name for pending in ranks.values()}
        where = f"collective {number} of {_group_name(group)}"
        title = f"{' / '.join(sorted(names))}, {where}"
        missing = [
            rank
            for rank in _members(snapshots, group)
            if (snapshot := snapshots[rank]) and snapshot.started.get(group, 0) < number
        ]
        absent = f"{ranks_text(missing)} never came" if missing else "nobody is missing"
        if len(names) > 1:
            calls = "; ".join(f"rank {r} calls {p.name}" for r, p in sorted(ranks.items()))
            lines.append(f"Mismatch at {where}: {calls}; {absent}.")
        elif not missing and len({pending.shapes for pending in ranks.values()}) > 1:
            shapes = "; ".join(f"rank {r} brings {p.shapes}" for r, p in sorted(ranks.items()))
            lines.append(f"{title}: every rank came, with different tensors: {shapes}.")
        else:
            lines.append(f"{title}: {ranks_text(ranks)} came, {absent}.")
    if not any(s is None or s.call or s.pending or s.stage == "is starting" for s in snapshots):
        lines.append("No rank waits for another: they may just need more time (timeout_s).")
    return lines


def _members(snapshots: list[Snapshot | None], group: str) -> list[int]:
    name = group.partition("/")[0]
    found = {r for s in snapshots if s for r in s.members.get(name, [])}
    return sorted(found)


def _group_name(group: str) -> str:
    name = group.partition("/")[0]
    return "the default group" if name == "0" else f"group {name}"


def ranks_text(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
