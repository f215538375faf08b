"""Checkpoints for ``notebooks/train.py``: written while it trains, and read in any layout."""

import json
import pickle
import shutil
import signal
from argparse import Namespace
from concurrent.futures import Future
from dataclasses import asdict
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

from vgpu.plan.transformer import TransformerSizes


class CheckpointRefused(Exception):
    """What's wrong with a file or folder, in one sentence; every rank raises the same."""


class Checkpoints:
    """Checkpoints of a model and its optimizer, in a folder shared by all hosts; None disables them.

    Each rank writes its own part. A checkpoint is complete once ``.metadata`` is written, last; the
    previous one is kept until then.
    """

    def __init__(
        self,
        folder: Path | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sizes: TransformerSizes,
        options: Namespace,
    ) -> None:
        self.folder, self.state = folder, (model, optimizer)
        named = {name: str(value) for name, value in vars(options).items()}
        self.made_with = {"sizes": asdict(sizes), "options": named}
        self.writing: Any = Future()
        self.writing.set_result(None)
        # The thread that writes has its own group, separate from the training's.
        self.group: Any = dist.new_group(backend="gloo") if folder else None
        self.is_terminated = False
        if folder:
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        self.is_terminated = True

    def asked_to_stop(self) -> bool:
        """Whether any rank has received SIGTERM, as from Slurm or torchrun; all ranks return the same.

        They agree by Gloo, on the host, so this waits for no GPU. Without a folder there's nothing
        to save, and SIGTERM ends the process as usual.
        """
        asked = torch.tensor(self.is_terminated)
        if self.folder:
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    def last(self) -> Path | None:
        """The last complete checkpoint."""
        found = self.folder.glob("step-*/.metadata") if self.folder else ()
        return max((path.parent for path in found), default=None)

    def load(self) -> int:
        """Load the last complete checkpoint; returns its step, or 0 if there is none."""
        if not self.folder:
            return 0
        found = [self.last()]
        dist.broadcast_object_list(found, src=0)
        if not (path := found[0]):
            return 0
        model, optimizer = get_state_dict(*self.state)
        found_made_with: dict[str, Any] = {"made_with": ""}
        try:  # fills this rank's tensors, regardless of how many ranks wrote
            dcp.load(found_made_with, checkpoint_id=path)
            there = json.loads(found_made_with["made_with"])
            if differences := _differences(there["sizes"], self.made_with["sizes"]):
                raise CheckpointRefused(f"{path} is from a different model: {differences}")
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        except CheckpointException as error:
            text = f"{path} is from a different model, or damaged: {_reason(error)}"
            raise CheckpointRefused(text) from error
        set_state_dict(*self.state, model_state_dict=model, optim_state_dict=optimizer)
        if dist.get_rank() == 0:
            changed = _differences(there["options"], self.made_with["options"])
            print(f"resumed from {path}" + (f"; {changed}" if changed else ""), flush=True)
        return int(path.name.removeprefix("step-"))

    def save(self, step: int) -> None:
        """Copy the tensors to the host; a thread writes them while training continues."""
        self.wait()
        if self.folder:
            path, (model, optimizer) = self.folder / f"step-{step:08d}", get_state_dict(*self.state)
            if dist.get_rank() == 0:
                for old in set(self.folder.glob("step-*")) - {self.last(), path}:
                    shutil.rmtree(old)
            made_with = json.dumps(self.made_with)
            state = {"model": model, "optimizer": optimizer, "made_with": made_with}
            self.writing = dcp.async_save(state, checkpoint_id=path, process_group=self.group)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; every rank raises an error of any rank."""
        try:
            self.writing.result()
        except CheckpointException as error:
            advice = "Make room or choose another folder; the last complete checkpoint is kept"
            text = f"cannot write into {self.folder}: {_reason(error)}. {advice}"
            raise CheckpointRefused(text) from error


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    changed = [name for name in here if here[name] != there.get(name)]
    return ", ".join(f"{name} was {there.get(name)}, now {here[name]}" for name in changed)


def _reason(error: CheckpointException) -> str:
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank} found {type(failure).__name__}: {str(failure).splitlines()[0]}"


def load_whole(model: nn.Module, path: Path) -> None:
    """Load a model, sharded or not, from a file with a full state dict, as written by ``torch.save``.

    Rank 0 broadcasts one full tensor at a time, and every rank keeps its shard.
    """
    try:
        whole = torch.load(path, map_location="cpu", mmap=True)  # values are read on demand
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointRefused(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(whole, dict):
        raise CheckpointRefused(f"{path} has no state dict, but a {type(whole).__name__}")
    whole, own = whole.get("model", whole), model.state_dict()
    for name in own | whole:
        there, here = (
            tuple(state[name].shape) if name in state else None for state in (whole, own)
        )
        if there != here:
            text = f"{path} is from a different model: {name} is {there} there, and {here} here"
            raise CheckpointRefused(text)
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=how)
