"""Checkpoints for ``notebooks/train.py``: written while it trains, and loaded into any layout."""

import json
import pickle
import re
import shutil
import signal
import tempfile
from argparse import Namespace
from collections.abc import Callable
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
    """What's wrong with a file or folder, in one sentence; all ranks raise the same error."""


class Checkpoints:
    """Checkpoints of a model and its optimizer in a folder; ``folder=None`` disables them.

    All hosts share the folder; each rank writes its own part. A checkpoint is complete once
    ``.metadata``, its last file, is written; the previous one is kept until then.
    """

    def __init__(self, folder: Path | None, sizes: TransformerSizes, options: Namespace) -> None:
        self.folder = folder
        named = {name: str(value) for name, value in vars(options).items()}
        self.made_with = {"sizes": asdict(sizes), "options": named}
        self.writing: Any = Future()
        self.writing.set_result(None)
        self.is_terminated = False
        self.last: Path | None = None
        """The last complete checkpoint when training starts, the same on all ranks."""
        if folder:
            # The thread that writes has its own process group, separate from the one used for training.
            self.group: Any = dist.new_group(backend="gloo")
            signal.signal(signal.SIGTERM, self._terminate)
            self.last = self._shared()

    def _terminate(self, *_: object) -> None:
        self.is_terminated = True

    def _shared(self) -> Path | None:
        """Return the last complete checkpoint, after checking that all ranks share the folder."""
        assert self.folder
        path: str | None = None
        problem = ""
        try:
            if dist.get_rank() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = tempfile.mkstemp(prefix=".rank-0-", dir=self.folder)[1]
        except OSError as error:
            problem = f"cannot write into {self.folder}: {error}. Choose another folder"
        last, path, problem = _from_rank_0(lambda: (self._complete(), path, problem))
        if not problem:
            try:
                assert path
                with open(path, "r+b"):
                    pass
            except OSError as error:
                problem = f"rank {dist.get_rank()} cannot write to the file that rank 0 created in "
                problem += f"{self.folder}: {error}. Choose a folder that all hosts share"
            problems: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(problems, problem)
            problem = max(problems)
            if dist.get_rank() == 0:
                Path(path).unlink()
        if problem:
            raise CheckpointRefused(problem)
        return last

    def _folders(self) -> list[Path]:
        """Return the folder's checkpoints, complete or not; other names aren't ours."""
        assert self.folder
        found = sorted(self.folder.glob("step-*"))
        return [path for path in found if re.fullmatch(r"step-\d{8}", path.name)]

    def _complete(self) -> Path | None:
        """Return the last complete checkpoint, if any."""
        return max(
            (path for path in self._folders() if (path / ".metadata").exists()), default=None
        )

    def asked_to_stop(self) -> bool:
        """Return whether any rank has received SIGTERM, for example from Slurm; all ranks get the same answer.

        The ranks agree through Gloo, on the host, so this doesn't wait for the GPUs. Without a
        folder there's nothing to save, and SIGTERM terminates the process as usual. Raises
        CheckpointRefused on all ranks if the last checkpoint couldn't be written.
        """
        failed = self.writing.done() and self.writing.exception() is not None
        asked = torch.tensor([self.is_terminated, failed])
        if self.folder:
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked[1]:
            self.wait()
        return bool(asked[0])

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the last complete checkpoint, if any; return its step, or 0.

        From then on, ``save`` saves this model and this optimizer.
        """
        self.state = model, optimizer
        if not (path := self.last):
            return 0
        parameters, moments = get_state_dict(*self.state)
        found_made_with: dict[str, Any] = {"made_with": ""}
        try:  # fills this rank's tensors, regardless of how many ranks wrote
            dcp.load(found_made_with, checkpoint_id=path)
            there = json.loads(found_made_with["made_with"])
            if differences := _differences(there["sizes"], self.made_with["sizes"]):
                raise CheckpointRefused(f"{path} is from a different model: {differences}")
            dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=path)
        except CheckpointException as error:
            text = f"{path} is from a different model, or damaged: {_reason(error)}"
            advice = "If you remove that folder, training resumes from the checkpoint before it"
            raise CheckpointRefused(f"{text}. {advice}") from error
        set_state_dict(*self.state, model_state_dict=parameters, optim_state_dict=moments)
        if dist.get_rank() == 0:
            changed = _differences(there["options"], self.made_with["options"])
            print(f"resumed from {path}" + (f"; {changed}" if changed else ""), flush=True)
        return int(path.name.removeprefix("step-"))

    def save(self, step: int) -> None:
        """Copy the tensors to the host; a thread writes them while training continues.

        The last complete checkpoint is kept until then; all earlier ones are deleted. To keep one,
        rename its folder.
        """
        self.wait()
        if self.folder:
            path, (model, optimizer) = self.folder / f"step-{step:08d}", get_state_dict(*self.state)
            if dist.get_rank() == 0:
                for old in set(self._folders()) - {self._complete(), path}:
                    shutil.rmtree(old, ignore_errors=True)
            made_with = json.dumps(self.made_with)
            state = {"model": model, "optimizer": optimizer, "made_with": made_with}
            self.writing = dcp.async_save(state, checkpoint_id=path, process_group=self.group)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; if writing failed on any rank, all raise."""
        try:
            self.writing.result()
        except CheckpointException as error:
            advice = "Make room or choose another folder; the last complete checkpoint is kept"
            text = f"cannot write into {self.folder}: {_reason(error)}. {advice}"
            raise CheckpointRefused(text) from error


def _from_rank_0(function: Callable[[], Any]) -> Any:
    """Call ``function`` on rank 0, and return its result on every rank."""
    results = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results, src=0)
    return results[0]


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    changed = [name for name in here if here[name] != there.get(name)]
    return ", ".join(f"{name} was {there.get(name)}, now {here[name]}" for name in changed)


def _reason(error: CheckpointException) -> str:
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank} got {type(failure).__name__}: {str(failure).splitlines()[0]}"


def load_whole(model: nn.Module, path: Path) -> None:
    """Load a model, sharded or not, from a file with a full state dict, as written by ``torch.save``.

    Rank 0 reads it and broadcasts one full tensor at a time; every rank keeps its shard. Raises
    CheckpointRefused on every rank if rank 0 can't read the file, or if it's from another model.
    """
    whole: dict[str, Any] = {}
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def read() -> str:
        """Fill ``whole``; return what's wrong with the file, or ""."""
        try:
            found = torch.load(path, map_location="cpu", mmap=True)  # values are read on demand
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            return f"cannot read {path}: {str(error).splitlines()[0]}"
        if not isinstance(found, dict):
            return f"{path} contains a {type(found).__name__}, not a state dict"
        whole.update(found.get("model", found))
        for name in own | whole:
            there = tuple(whole[name].shape) if name in whole else "missing"
            if there != (here := own.get(name, "missing")):
                return f"{path} is from a different model: {name} is {there} there, and {here} here"
        return ""

    if problem := _from_rank_0(read):
        raise CheckpointRefused(problem)
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=how)
