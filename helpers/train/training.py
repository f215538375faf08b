"""One training run as one of its ranks sees it: data, model and progress.

However many ranks share it, and whatever they share, every step sees the same samples, so the
parameters equal those of one process up to rounding. Resumed on as many ranks in the same layout,
they are those of an undisturbed run bit for bit.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers.train import checkpoints
from helpers.train.checkpoints import Checkpoint, CheckpointError
from helpers.train.tasks import TASKS, Settings
from vgpu.launch import launcher
from vgpu.plan.layout import Layout, apply_fsdp, apply_tp, loss_context
from vgpu.plan.transformer import Transformer

SCORED_AT_ONCE = 512
"""Held-out samples that a model gets at once."""


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin in the middle of an epoch, after ``skip`` samples.

    The order of an epoch follows from its number and the seed, so nothing else has to be saved.
    """

    skip = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.skip, None)

    def __len__(self) -> int:
        return self.num_samples - self.skip


class Training:
    """One training run as one rank sees it; the default process group exists already.

    ``layout`` says what the ranks share; by default each holds a copy of the model (DDP).

    Raises ValueError if the ranks cannot share a batch or the model equally; CheckpointError if
    ``folder`` cannot be written or is in use by another run, or holds a checkpoint that does not fit.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path | None = None,
        cpu: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.layout = layout or Layout(dp_replicate=self.ranks)
        _check_layout(self.layout, self.ranks)
        self.device = _device(cpu)
        self.task = TASKS[settings.model](settings)
        self.task.check(self.layout)
        _check_batch(settings.batch_size, self.layout.dp)
        if folder:
            checkpoints.prepare(folder)
        data = TensorDataset(*self.task.samples(train=True))
        self.sampler, self.loader = self._parts_of(data)
        self.steps_per_epoch = len(data) // settings.batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"a batch of {settings.batch_size} is larger than the {len(data)} samples"
            )
        torch.manual_seed(settings.seed)
        self.bare = self.task.model().to(self.device)
        self.model = self._shared(self.bare)
        self.optimizer = self.task.optimizer(self.model.parameters())
        torch.manual_seed(settings.seed + 1 + self.rank)  # each rank drops other activations
        self.step = 0
        self.history: list[float] = []
        """What ``score`` was after each epoch."""
        self.resumed_from: Path | None = None
        if last := checkpoints.newest(folder) if folder else None:
            self.resumed_from = last.path
            self._resume(last)

    @property
    def steps(self) -> int:
        return self.settings.epochs * self.steps_per_epoch

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's parts of the batches that are still to come, of all epochs."""
        while self.step < self.steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            self.sampler.set_epoch(epoch)
            self.sampler.skip = done * self.settings.batch_size // self.layout.dp
            for inputs, targets in self.loader:
                yield inputs.to(self.device), targets.to(self.device)

    def train_on(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One step on a part of a batch, as ``batches`` yields it; this rank's loss, a scalar."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * (1 - self.step / self.steps)
        self.optimizer.zero_grad()
        with loss_context(self.layout):
            loss = self.task.loss(self.model(inputs), targets)
            loss.backward()
        self.optimizer.step()
        self.step += 1
        if self.step % self.steps_per_epoch == 0:
            self.history.append(self.score())
        return _whole(loss.detach())

    @torch.no_grad()
    def score(self) -> float:
        """What the task measures on its held-out samples; all ranks call it, and all get it."""
        inputs, targets = (tensor.to(self.device) for tensor in self.task.samples(train=False))
        self.bare.eval()
        total = torch.zeros((), dtype=torch.double)
        with loss_context(self.layout):
            for part in torch.arange(len(inputs)).split(SCORED_AT_ONCE):
                scores = self.task.score(self.bare(inputs[part]), targets[part])
                total += _whole(scores).double().cpu() * len(part)
        self.bare.train()
        return (total / len(inputs)).item()

    def save(self) -> None:
        """Write a checkpoint into the folder, all ranks together."""
        assert self.folder is not None
        made_with = {**asdict(self.settings), **self._place()}
        checkpoints.save(self.folder, self.step, self._state(), made_with)

    def _parts_of(self, data: TensorDataset) -> tuple[ResumableSampler, DataLoader[Any]]:
        """This rank's part of each batch. Ranks of ``tp`` compute on the same samples."""
        parts, settings = self.layout.dp, self.settings
        # Dropping the tail keeps the batches the same on any number of ranks: nothing is padded.
        sampler = ResumableSampler(
            data, parts, self.rank // self.layout.tp, seed=settings.seed, drop_last=True
        )
        loader = DataLoader(
            data,
            settings.batch_size // parts,
            sampler=sampler,
            drop_last=True,
            # A loader draws a seed for its workers; that must not move the random state of dropout.
            generator=torch.Generator(),
        )
        return sampler, loader

    def _shared(self, model: nn.Module) -> nn.Module:
        """The model as the layout divides it: in place, or inside DDP."""
        layout = self.layout
        if layout.dp_shard == layout.tp == 1:
            return DDP(model, device_ids=None if self.device.type == "cpu" else [self.device])
        mesh = layout.mesh(self.device.type)
        if layout.tp > 1:
            assert isinstance(model, Transformer), "the task's check lets no other pass"
            apply_tp(model, mesh["tp"])
        if layout.dp > 1:
            dp = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
            apply_fsdp(model, self.task.units(model), mesh[dp])
        return model

    def _place(self) -> dict[str, Any]:
        """Where the ranks are and what they share, which may differ when a training run resumes."""
        return {"ranks": self.ranks, "device": self.device.type, "layout": str(self.layout)}

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        random = {"cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            random[self.device.type] = module.get_rng_state(self.device)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "history": self.history,
            # Every rank has random numbers of its own; all else is equal on all ranks.
            f"random numbers of rank {self.rank}": random,
        }

    def _resume(self, checkpoint: Checkpoint) -> None:
        found = checkpoint.made_with
        for field in fields(self.settings):
            wanted = getattr(self.settings, field.name)
            made = found.get(field.name, field.default)  # older checkpoints do not name a model
            if made != wanted:
                option = f"--{field.name.replace('_', '-')}"
                raise CheckpointError(
                    f"{checkpoint.path} was made with {option} {made}, and this run "
                    f"has {option} {wanted}. Use the same, or another folder for --checkpoints."
                )
        state = self._state()
        random = state[f"random numbers of rank {self.rank}"]
        alike = all(found.get(name) == value for name, value in self._place().items())
        if not alike:
            # The numbers there belong to other ranks; this rank goes on with its fresh ones.
            del state[f"random numbers of rank {self.rank}"]
        checkpoints.load(checkpoint.path, state)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step, self.history = state["step"], state["history"]
        if alike:
            torch.set_rng_state(random["cpu"])
            if self.device.type != "cpu":
                module = torch.get_device_module(self.device)
                module.set_rng_state(random[self.device.type], self.device)


def _check_layout(layout: Layout, ranks: int) -> None:
    if layout.ranks != ranks:
        raise ValueError(
            f"the layout {layout} is one for {layout.ranks} ranks, and {ranks} run here"
        )
    if layout.pp > 1:
        raise ValueError(
            f"the layout {layout} has stages; this trainer runs no pipeline: use dp_replicate, "
            "dp_shard and tp"
        )


def _check_batch(size: int, parts: int) -> None:
    if size % parts:
        lower = size // parts * parts
        even = " or ".join(str(n) for n in (lower, lower + parts) if n)
        raise ValueError(
            f"a batch of {size} cannot be split evenly among {parts} ranks; use --batch-size {even}"
        )


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A scalar that ranks sharing tensors all hold, as an ordinary tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _device(cpu: bool) -> torch.device:
    """This rank's own GPU if each rank of this machine has one, else the CPU."""
    kind = "cpu" if cpu else launcher.device_type()
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    torch.accelerator.set_device_index(device.index)
    return device
