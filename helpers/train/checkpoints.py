"""Distributed checkpoints that are whole or not there, in a folder that all ranks share.

``torch.distributed.checkpoint`` lets every rank write its part. Here it writes into a folder
beside the last checkpoint, which gets its name once everything is on the disk::

    run/step-00000132/    .metadata  __0_0.distcp  __1_0.distcp  run.json
    run/unfinished/       only while a checkpoint is being written, or after that was cut off

``run.json`` says how the checkpoint was made; it can be read before anything is loaded. These
functions are collectives: every rank of the default process group calls them.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

_NAME = re.compile(r"step-\d{8,}")
_UNFINISHED = "unfinished"
_MADE_WITH = "run.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message says which, why and what to do."""


def newest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step, as rank 0 sees the folder; None without one."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0 and folder.is_dir():
        found = [max(_whole(folder), key=_step, default=None)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def save(folder: Path, step: int, state: dict[str, Any], made_with: dict[str, Any]) -> Path:
    """Write the state of ``step`` (all ranks together), then remove the checkpoint before it.

    Tensors that are equal on all ranks may have the same key; what differs needs a key for each
    rank. ``made_with`` has to fit into JSON. Raises CheckpointError on every rank.
    """
    unfinished, whole = folder / _UNFINISHED, folder / f"step-{step:08d}"
    _on_rank_0(f"write into {folder}", lambda: _clear(unfinished))
    try:
        metadata = dcp.save(state, checkpoint_id=unfinished)
    except CheckpointException as error:
        raise CheckpointError(f"cannot write into {folder}: {_first(error)}") from error
    _on_rank_0(f"finish {whole}", lambda: _finish(unfinished, whole, metadata, made_with))
    return whole


def made_with(checkpoint: Path) -> dict[str, Any]:
    """What ``save`` was told about how the checkpoint was made."""
    read: list[Any] = [None]

    def read_json() -> None:
        read[0] = json.loads((checkpoint / _MADE_WITH).read_text(encoding="utf-8"))

    _on_rank_0(f"read {checkpoint}", read_json)
    dist.broadcast_object_list(read, src=0)
    return read[0]


def load(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fill ``state`` with what the checkpoint has under its keys; tensors are filled in place.

    Raises CheckpointError where a file or a key is missing, or a size differs.
    """
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except CheckpointException as error:
        raise CheckpointError(
            f"cannot read {checkpoint}: {_first(error)}. If it is damaged, delete that folder."
        ) from error


def _whole(folder: Path) -> list[Path]:
    # A checkpoint has its name only since it was whole.
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _clear(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _finish(unfinished: Path, whole: Path, metadata: Any, made_with: dict[str, Any]) -> None:
    written = {info.relative_path for info in (metadata.storage_data or {}).values()}
    unseen = sorted(name for name in written if not (unfinished / name).exists())
    if unseen:
        raise FileNotFoundError(
            f"rank 0 does not see {unseen[0]}, which another rank has written. All hosts must "
            "share the folder (NFS, for one)"
        )
    with open(unfinished / _MADE_WITH, "w", encoding="utf-8") as file:
        json.dump(made_with, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, whole)
    if os.name == "posix":
        # The new name is on the disk before the checkpoint of before goes.
        handle = os.open(whole.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    for path in _whole(whole.parent):
        if path != whole:
            shutil.rmtree(path)


def _on_rank_0(what: str, action: Any) -> None:
    """Act on rank 0 while the others wait; where it fails, all ranks raise the same."""
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except (OSError, ValueError) as error:
            failed = [f"cannot {what}: {error}"]
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise CheckpointError(failed[0])


def _first(error: CheckpointException) -> str:
    """One rank's own exception, which torch has wrapped up with those of all ranks."""
    rank, (exception, _) = min(error.failures.items())
    return f"rank {rank}: {type(exception).__name__}: {str(exception).splitlines()[0]}"
