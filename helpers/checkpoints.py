"""Checkpoints for ``notebooks/train.py``: written while it trains, and read in any layout."""

import pickle
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)


class CheckpointRefused(Exception):
    """What is wrong with a file or a folder, in a sentence; every rank raises the same."""


class Checkpoints:
    """Those of a model and its optimizer, in a folder that all hosts share; None writes nothing.

    Each rank writes its own part. A checkpoint is whole once ``.metadata`` is written, last; the one
    before it is kept until then.
    """

    def __init__(
        self, folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.folder, self.state = folder, (model, optimizer)
        self.writing: Any = Future()
        self.writing.set_result(None)
        # The thread that writes has a group of its own, beside what the training sends.
        self.group: Any = dist.new_group(backend="gloo") if folder else None

    def last(self) -> Path | None:
        """The last whole one."""
        found = self.folder.glob("step-*/.metadata") if self.folder else ()
        return max((path.parent for path in found), default=None)

    def load(self) -> int:
        """Go on from the last whole one: its step, or 0 where there is none."""
        if not self.folder:
            return 0
        found = [self.last()]
        dist.broadcast_object_list(found, src=0)
        if not (path := found[0]):
            return 0
        model, optimizer = get_state_dict(*self.state)
        try:  # fills this rank's tensors, however many ranks wrote
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        except CheckpointException as error:
            text = f"{path} is not of this model, or is damaged: {_reason(error)}"
            raise CheckpointRefused(text) from error
        set_state_dict(*self.state, model_state_dict=model, optim_state_dict=optimizer)
        if dist.get_rank() == 0:
            print(f"resumed from {path}", flush=True)
        return int(path.name.removeprefix("step-"))

    def save(self, step: int) -> None:
        """Copy the tensors to the host, and let a thread write them while training goes on."""
        self.wait()
        if self.folder:
            path, (model, optimizer) = self.folder / f"step-{step:08d}", get_state_dict(*self.state)
            if dist.get_rank() == 0:
                for old in set(self.folder.glob("step-*")) - {self.last(), path}:
                    shutil.rmtree(old)
            state = {"model": model, "optimizer": optimizer}
            self.writing = dcp.async_save(state, checkpoint_id=path, process_group=self.group)

    def wait(self) -> None:
        """Until the last one is whole; every rank learns of an error on any of them."""
        try:
            self.writing.result()
        except CheckpointException as error:
            advice = "Make room or choose another folder; the last whole checkpoint is kept"
            text = f"cannot write into {self.folder}: {_reason(error)}. {advice}"
            raise CheckpointRefused(text) from error


def _reason(error: CheckpointException) -> str:
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank} found {type(failure).__name__}: {str(failure).splitlines()[0]}"


def load_whole(model: nn.Module, path: Path) -> None:
    """Fill a model, divided or not, from a file with a whole state dict, as ``torch.save`` writes it.

    Rank 0 sends one whole tensor at a time, and every rank keeps its part of it.
    """
    try:
        whole = torch.load(path, map_location="cpu", mmap=True)  # numbers are read when asked for
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointRefused(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    whole, own = whole.get("model", whole), model.state_dict()
    for name in own | whole:
        there, here = (
            tuple(state[name].shape) if name in state else None for state in (whole, own)
        )
        if there != here:
            text = f"{path} is of another model: {name} is {there} there, and {here} here"
            raise CheckpointRefused(text)
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=how)
