"""The folder of a run: tried out by every rank before the first step, and held by one run only.

A folder that is read-only, full or not shared would otherwise be noticed when the first checkpoint
is written. These functions are collectives: every rank of the default process group calls them.
"""

import errno
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary, finalize

import torch.distributed as dist

from vgpu.units import format_bytes

if os.name == "posix":
    import fcntl

LOST_HOST_S = 120.0
"""How long a network disk may keep what a lost host has locked; NFS takes 90 s."""

UNFINISHED = "unfinished"
"""Where a checkpoint is written before it gets its name; what is there at the start is left over."""

_LOCK = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
FULL_DISK = "Make room, then give the same command again: checkpoints that were whole stay."
"""What to do; torch's own writer reports a full disk without an errno."""

_ADVICE = {
    errno.EACCES: "Make it writable, or name another folder with --checkpoints.",
    errno.ENOSPC: FULL_DISK,
}
_ADVICE |= dict.fromkeys((errno.EPERM, errno.EROFS, errno.ENOTDIR), _ADVICE[errno.EACCES])
_ADVICE |= {errno.ENOENT: _ADVICE[errno.EACCES], errno.EDQUOT: _ADVICE[errno.ENOSPC]}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message says which, why and what to do."""


class Hold:
    """A folder that this process holds for as long as the object lives."""

    def __init__(self, file: IO[str] | None) -> None:
        if file is not None:
            finalize(self, file.close)  # which gives the lock back


# Two Trainings in one process are not two runs.
_held: WeakValueDictionary[Path, Hold] = WeakValueDictionary()


def claim(folder: Path) -> Hold | None:
    """Make the folder, try it out, and hold it; only rank 0 is given something to keep.

    Raises CheckpointError on all ranks if one of them cannot write there, if they do not share the
    folder, or if another run holds it.
    """
    held: list[Hold] = []

    def hold() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        held.append(_hold(folder))
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)

    on_rank_0(f"use {folder}", hold)
    _try_out(folder)
    return held[0] if held else None


def on_rank_0(what: str, action: Callable[[], object]) -> None:
    """Act on rank 0 while the others wait; if that fails, all ranks raise the same."""
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except (OSError, ValueError) as error:
            failed = [f"cannot {what}: {explained(error)}"]
        except CheckpointError as error:
            failed = [str(error)]
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise CheckpointError(failed[0])


def on_all_ranks(what: str, action: Callable[[], Any]) -> list[Any]:
    """What each rank returns, by rank; if one fails, all of them raise its failure."""
    mine: tuple[Any, str | None]
    try:
        mine = (action(), None)
    except OSError as error:
        rank = f"rank {dist.get_rank()} on {socket.gethostname()}"
        mine = (None, f"{rank} cannot {what}: {explained(error)}")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for _, failure in found:
        if failure is not None:
            raise CheckpointError(failure)
    return [value for value, _ in found]


def explained(error: Exception) -> str:
    """An error of the file system with what to do about it, if that is known."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    said = f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
    return f"{said}. {_ADVICE[error.errno]}" if error.errno in _ADVICE else said


def free_text(folder: Path) -> str:
    """How much room a folder's disk has, for a message."""
    return f"{format_bytes(shutil.disk_usage(folder).free)} are free in {folder}"


def _hold(folder: Path) -> Hold:
    known = _held.get(folder.resolve())
    if known is None:
        known = _held[folder.resolve()] = Hold(_locked(folder))
    return known


def _locked(folder: Path) -> IO[str] | None:
    """The folder's lock file, locked; None if the system or the disk has no locks."""
    if os.name != "posix":
        return None
    file = (folder / _LOCK).open("a+", encoding="utf-8")
    until_s = time.monotonic() + LOST_HOST_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _CANNOT_LOCK:
                return None
            if error.errno not in _TAKEN:
                raise
        else:
            break
        holder = _holder(file)
        # On this host a lock ends with the process that holds it.
        if holder.get("host") == socket.gethostname() or time.monotonic() > until_s:
            file.close()
            raise CheckpointError(
                f"another run uses {folder}: process {holder.get('process', '?')} on "
                f"{holder.get('host', 'an unknown host')}. Two runs would overwrite each other's "
                "checkpoints. Wait for it or end it, or name another folder with --checkpoints."
            )
        time.sleep(1)
    file.truncate(0)
    json.dump({"host": socket.gethostname(), "process": os.getpid()}, file)
    file.flush()
    return file


def _holder(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        return dict(json.loads(file.read()))
    except ValueError:
        return {}  # it has only just been locked


def _try_out(folder: Path) -> None:
    token = [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0)

    def name(rank: int) -> Path:
        return folder / f".try-{token[0]}-{rank}"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)  # a host that does not share it has none yet
        name(dist.get_rank()).write_text("A rank tries whether it can write here.\n")

    try:
        on_all_ranks(f"write into {folder}", write)

        def look() -> None:
            for rank in range(dist.get_world_size()):
                if not name(rank).exists():
                    raise CheckpointError(
                        f"{folder} is not the same folder on all hosts: rank 0 does not see what "
                        f"rank {rank} has written. All hosts must share the folder (NFS, for one)."
                    )

        on_rank_0(f"read {folder}", look)
    finally:
        with suppress(OSError):  # a file that could not be written has been reported
            name(dist.get_rank()).unlink(missing_ok=True)
