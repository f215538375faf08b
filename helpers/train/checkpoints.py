"""Distributed checkpoints that are whole or not there, in a folder that all ranks share.

``torch.distributed.checkpoint`` lets every rank write its part. Here it writes into a folder
beside the last checkpoint, which gets its name once everything is on the disk::

    run/step-00000088/    the one before, in case a disk spoils the last one
    run/step-00000132/    .metadata  __0_0.distcp  __1_0.distcp  run.json
    run/unfinished/       only while a checkpoint is being written, or after that was cut off

``run.json`` says how the checkpoint was made and holds a checksum of each file, itself included.
All of them are compared before anything is loaded. These functions are collectives: every rank of
the default process group calls them.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from helpers.train.folders import (
    FULL_DISK,
    UNFINISHED,
    CheckpointError,
    explained,
    free_text,
    on_all_ranks,
    on_rank_0,
)

_NAME = re.compile(r"step-\d{8,}")
_RUN = "run.json"


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files are as they were written."""

    path: Path
    made_with: dict[str, Any]
    """How it was made, as ``save`` was given it."""
    passed_over: tuple[str, ...]
    """Newer checkpoints that are damaged: which, and what is wrong with each."""


def newest(folder: Path) -> Found | None:
    """The undamaged checkpoint of the highest step; None if there is no checkpoint at all.

    Raises CheckpointError if there are checkpoints and all of them are damaged.
    """
    found: list[list[Path]] = [[]]
    if dist.get_rank() == 0 and folder.is_dir():
        found = [sorted(_whole(folder), key=_step, reverse=True)]
    dist.broadcast_object_list(found, src=0)
    damaged: list[str] = []
    for path in found[0]:
        run, problem = _verified(path)
        if problem is None:
            return Found(path, run["made_with"], tuple(damaged))
        damaged.append(f"{path} is damaged: {problem}")
    if damaged:
        raise CheckpointError(
            "\n".join(damaged)
            + "\nNo other checkpoint is there to go on from. Put back a copy, or "
            "delete these to begin anew."
        )
    return None


def save(folder: Path, step: int, state: dict[str, Any], made_with: dict[str, Any]) -> Path:
    """Write the state of ``step``, all ranks together; of the others the one before it is kept.

    Tensors that are equal on all ranks may have the same key; what differs needs a key for each
    rank. ``made_with`` has to fit into JSON. Raises CheckpointError on every rank.
    """
    unfinished, whole = folder / UNFINISHED, folder / f"step-{step:08d}"
    on_rank_0(f"write into {folder}", lambda: _clear(unfinished))
    try:
        metadata = dcp.save(state, checkpoint_id=unfinished)
    except CheckpointException as error:
        room = free_text(folder)
        on_rank_0(f"clear {unfinished}", lambda: _clear(unfinished))
        said = f"cannot write {whole}: {_first(error)} ({room})"
        raise CheckpointError(said if FULL_DISK in said else f"{said}. {FULL_DISK}") from error
    own = f"__{dist.get_rank()}_*"  # as torch names the files that this rank has written
    parts = on_all_ranks(f"read {unfinished}", lambda: _described(unfinished.glob(own)))
    files = {name: seen for part in parts for name, seen in part.items()}
    written = {info.relative_path for info in (metadata.storage_data or {}).values()}
    run = {"made_with": made_with, "files": files}

    def finish() -> None:
        _expect(unfinished, written, files)
        files.update(_described([unfinished / ".metadata"]))
        _write(unfinished / _RUN, run)
        _rename(unfinished, whole)
        _tidy(whole)

    on_rank_0(f"finish {whole}", finish)
    return whole


def load(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fill ``state`` with what the checkpoint has under its keys; tensors are filled in place.

    Raises CheckpointError if a key is missing or a size differs.
    """
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except CheckpointException as error:
        raise CheckpointError(
            f"cannot use {checkpoint}: {_first(error)}. Another version of this program may have "
            "written it; name another folder with --checkpoints."
        ) from error


def _verified(checkpoint: Path) -> tuple[dict[str, Any], str | None]:
    """What ``run.json`` says, and what is wrong with the checkpoint, the same on all ranks."""
    read: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            read[0] = _read(checkpoint / _RUN)
        except (OSError, ValueError) as error:
            read[1] = f"{_RUN}: {explained(error)}"
    dist.broadcast_object_list(read, src=0)
    run, problem = read
    if problem is None:
        names = sorted(run["files"])[dist.get_rank() :: dist.get_world_size()]
        mine = [_difference(checkpoint / name, run["files"][name]) for name in names]
        everyones: list[list[str | None]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, mine)
        problem = "; ".join(p for part in everyones for p in part if p is not None) or None
    return run, problem


def _difference(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        found = _described([path])[path.name]
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if found["bytes"] != expected["bytes"]:
        return f"{path.name} has {found['bytes']} bytes, and was written with {expected['bytes']}"
    if found["sha256"] != expected["sha256"]:
        return f"{path.name} has other bytes than were written (its SHA-256 differs)"
    return None


def _described(paths: Any) -> dict[str, dict[str, Any]]:
    described = {}
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            described[path.name] = {"bytes": file.tell(), "sha256": digest}
    return described


def _write(path: Path, run: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump({**run, "sha256": _seal(run)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        sealed = run.pop("sha256")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"it is not as it was written ({error})") from error
    if sealed != _seal(run):
        raise ValueError("it has other content than was written (its SHA-256 differs)")
    return run


def _seal(run: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def _whole(folder: Path) -> list[Path]:
    # A checkpoint has its name only since it was whole.
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _clear(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _expect(unfinished: Path, written: set[str], files: dict[str, Any]) -> None:
    unseen = sorted(n for n in written if n not in files or not (unfinished / n).exists())
    if unseen:
        raise FileNotFoundError(
            f"rank 0 does not see {unseen[0]}, which another rank has written. All hosts must "
            "share the folder (NFS, for one)"
        )


def _rename(unfinished: Path, whole: Path) -> None:
    if whole.exists():
        shutil.rmtree(whole)  # newer than what this run resumed from: damaged
    os.replace(unfinished, whole)
    if os.name == "posix":
        # The new name is on the disk before an older checkpoint goes.
        handle = os.open(whole.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _tidy(whole: Path) -> None:
    """Keep the new checkpoint and the one before it. Newer ones were damaged: see ``newest``."""
    others = [path for path in _whole(whole.parent) if path != whole]
    before = max((p for p in others if _step(p) < _step(whole)), key=_step, default=None)
    for path in others:
        if path != before:
            shutil.rmtree(path)


def _first(error: CheckpointException) -> str:
    """One rank's own exception, which torch has wrapped up with those of all ranks."""
    rank, (exception, _) = min(error.failures.items())
    if isinstance(exception, OSError):
        return f"rank {rank}: {explained(exception)}"
    return f"rank {rank}: {type(exception).__name__}: {str(exception).splitlines()[0]}"
