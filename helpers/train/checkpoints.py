"""Distributed checkpoints that are whole or not there, in a folder that all ranks share.

``torch.distributed.checkpoint`` lets every rank write its part. Here it writes into a folder beside
the last checkpoint, which gets its name once everything is on the disk::

    run/step-00000088/    the one before
    run/step-00000132/    .metadata  __0_0.distcp  __1_0.distcp  run.json
    run/unfinished/       only while a checkpoint is being written, or after that was cut off

These functions are collectives: every rank of the default process group calls them.
"""

import errno
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from vgpu.units import format_bytes

_NAME = re.compile(r"step-\d{8,}")
_RUN, _UNFINISHED = "run.json", "unfinished"
_FULL_DISK = "Make room, then give the same command again: finished checkpoints are kept."
_ADVICE = dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT),
    "Make it writable, or name another folder with --checkpoints.",
) | dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL_DISK)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint and how it was made, as ``save`` was given it."""

    path: Path
    made_with: dict[str, Any]


def prepare(folder: Path) -> None:
    """Make the folder, and let every rank try to write there before the first step.

    Raises CheckpointError on all ranks if one of them cannot.
    """

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass

    _on_all_ranks(f"write into {folder}", write)
    _on_rank_0(f"clear {folder}", lambda: shutil.rmtree(folder / _UNFINISHED, ignore_errors=True))


def newest(folder: Path) -> Checkpoint | None:
    """The checkpoint of the highest step, or None if there is none.

    Raises CheckpointError if its ``run.json`` cannot be read.
    """
    found: list[Checkpoint | None] = [None]

    def look() -> None:
        paths = sorted(_finished(folder), key=_step) if folder.is_dir() else []
        if paths:
            text = (paths[-1] / _RUN).read_text(encoding="utf-8")
            found[0] = Checkpoint(paths[-1], json.loads(text))

    _on_rank_0(f"read the checkpoints in {folder}", look)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def save(folder: Path, step: int, state: dict[str, Any], made_with: dict[str, Any]) -> Path:
    """Write the state of ``step``, all ranks together; of the others the one before it is kept.

    Tensors that are equal on all ranks may have the same key; what differs needs a key for each
    rank. ``made_with`` has to fit into JSON. Raises CheckpointError on every rank.
    """
    unfinished, finished = folder / _UNFINISHED, folder / f"step-{step:08d}"
    _on_rank_0(f"write into {folder}", lambda: _clear(unfinished))
    try:
        metadata = dcp.save(state, checkpoint_id=unfinished)
    except CheckpointException as error:
        room = format_bytes(shutil.disk_usage(folder).free)
        _on_rank_0(f"clear {unfinished}", lambda: _clear(unfinished))
        message = f"cannot write {finished}: {_cause(error)} ({room} are free in {folder})"
        # torch's own writer reports a full disk without an errno.
        advice = "" if _FULL_DISK in message else f". {_FULL_DISK}"
        raise CheckpointError(message + advice) from error
    written = {info.relative_path for info in (metadata.storage_data or {}).values()}

    def finish() -> None:
        for name in sorted(written):
            if not (unfinished / name).exists():
                raise FileNotFoundError(
                    f"rank 0 does not see {name}, which another rank has written. All hosts must "
                    "share the folder (NFS, for one)"
                )
        with (unfinished / _RUN).open("w", encoding="utf-8") as file:
            json.dump(made_with, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if finished.exists():
            shutil.rmtree(finished)
        os.replace(unfinished, finished)
        for old in sorted(_finished(folder), key=_step)[:-2]:
            shutil.rmtree(old)

    _on_rank_0(f"finish {finished}", finish)
    return finished


def load(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fill ``state`` with what the checkpoint has under its keys; tensors are filled in place.

    Raises CheckpointError if a file cannot be read, a key is missing or a size differs.
    """
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except CheckpointException as error:
        raise CheckpointError(
            f"cannot use {checkpoint}: {_cause(error)}. Delete it to go on from the one before, or "
            "name another folder with --checkpoints."
        ) from error


def _on_rank_0(action: str, function: Callable[[], object]) -> None:
    """Call the function on rank 0 while the others wait; if it fails, all ranks raise the same."""
    _on_all_ranks(action, function if dist.get_rank() == 0 else lambda: None)


def _on_all_ranks(action: str, function: Callable[[], object]) -> None:
    """Call the function on every rank; if it fails on one, all of them raise that failure."""
    failure: str | None = None
    try:
        function()
    except (OSError, ValueError) as error:
        rank = f"rank {dist.get_rank()} on {socket.gethostname()}"
        failure = f"{rank} cannot {action}: {_explained(error)}"
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for message in failures:
        if message is not None:
            raise CheckpointError(message)


def _explained(error: Exception) -> str:
    """An error of the file system, with what to do about it if that is known."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    text = f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
    return f"{text}. {_ADVICE[error.errno]}" if error.errno in _ADVICE else text


def _cause(error: CheckpointException) -> str:
    """One rank's own exception, which torch has wrapped up with those of all ranks."""
    rank, (exception, _) = min(error.failures.items())
    if isinstance(exception, OSError):
        return f"rank {rank}: {_explained(exception)}"
    return f"rank {rank}: {type(exception).__name__}: {str(exception).splitlines()[0]}"


def _finished(folder: Path) -> list[Path]:
    # A checkpoint gets its name when it is finished.
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _clear(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
