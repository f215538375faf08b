"""One training of the digits with DDP as one of its ranks sees it: data, model and progress.

Whatever the number of ranks, every step sees the same samples, so the parameters equal those of
one process up to rounding. Resumed on as many ranks, they are those of an undisturbed run bit for
bit.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers.data import Digits
from helpers.launch import machine
from helpers.models import DigitsCNN
from helpers.train import checkpoints, folders
from helpers.train.checkpoints import Found
from helpers.train.folders import CheckpointError

DTYPES = {"single": torch.float32, "double": torch.float64}


@dataclass(frozen=True)
class Settings:
    """All that the final parameters depend on, up to rounding."""

    epochs: int = 8
    batch_size: int = 32
    """Samples a step, on all ranks together; each rank takes an equal part of them."""
    learning_rate: float = 0.07
    """At the first step; it decreases linearly to zero."""
    momentum: float = 0.9
    dropout: float = 0.0
    width: int = 16
    precision: str = "double"
    seed: int = 0


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
    """One training as one rank sees it; the default process group exists already.

    Raises ValueError if the ranks cannot share a batch equally; CheckpointError if ``folder`` cannot
    be written or is in use by another run, or holds a checkpoint that does not fit.
    """

    def __init__(self, settings: Settings, folder: Path | None = None, cpu: bool = False) -> None:
        self.settings = settings
        self.folder = folder
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device, self.dtype = _device(cpu), DTYPES[settings.precision]
        if settings.batch_size % self.ranks:
            lower = settings.batch_size // self.ranks * self.ranks
            even = " or ".join(str(n) for n in (lower, lower + self.ranks) if n)
            raise ValueError(
                f"a batch of {settings.batch_size} cannot be split evenly among {self.ranks} "
                f"ranks; use --batch-size {even}"
            )
        self._hold = folders.claim(folder) if folder else None
        data = TensorDataset(*self._digits(train=True))
        # Dropping the tail keeps the batches the same on any number of ranks: nothing is padded.
        self.sampler = ResumableSampler(data, seed=settings.seed, drop_last=True)
        self.loader = DataLoader(
            data,
            settings.batch_size // self.ranks,
            sampler=self.sampler,
            drop_last=True,
            # A loader draws a seed for its workers; that must not move the random state of dropout.
            generator=torch.Generator(),
        )
        self.steps_per_epoch = len(data) // settings.batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"a batch of {settings.batch_size} is larger than the {len(data)} samples"
            )
        torch.manual_seed(settings.seed)
        model = DigitsCNN(settings.width, settings.dropout).to(self.device, self.dtype)
        self.model = DDP(model, device_ids=None if self.device.type == "cpu" else [self.device])
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0, momentum=settings.momentum)
        torch.manual_seed(settings.seed + 1 + self.rank)  # each rank drops other activations
        self.step = 0
        self.history: list[float] = []
        """Share of the held-out digits that were right after each epoch; filled on rank 0."""
        self.resumed_from: Path | None = None
        self.passed_over: tuple[str, ...] = ()
        """Newer checkpoints that are damaged: which, and what is wrong with each."""
        if found := checkpoints.newest(folder) if folder else None:
            self.resumed_from, self.passed_over = found.path, found.passed_over
            self._resume(found)
        self.saved_step = self.step

    @property
    def steps(self) -> int:
        return self.settings.epochs * self.steps_per_epoch

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's parts of the batches that are still to come, of all epochs."""
        while self.step < self.steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            self.sampler.set_epoch(epoch)
            self.sampler.skip = done * self.settings.batch_size // self.ranks
            for images, labels in self.loader:
                yield images.to(self.device), labels.to(self.device)

    def train_on(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One step on (b, 1, 8, 8) images and (b,) labels; this rank's loss, a scalar."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * (1 - self.step / self.steps)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        if self.step % self.steps_per_epoch == 0 and self.rank == 0:
            self.history.append(self.accuracy())
        return loss.detach()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out digits that this rank gets right, without asking the others."""
        images, labels = (tensor.to(self.device) for tensor in self._digits(train=False))
        self.model.module.eval()
        right = (self.model.module(images).argmax(1) == labels).double().mean().item()
        self.model.module.train()
        return right

    def save(self) -> None:
        """Write a checkpoint into the folder, all ranks together."""
        assert self.folder is not None
        made_with = {**asdict(self.settings), "ranks": self.ranks, "device": self.device.type}
        checkpoints.save(self.folder, self.step, self._state(), made_with)
        self.saved_step = self.step

    def _digits(self, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        digits = Digits(train=train)
        return digits.data[:, None].to(self.dtype) / 255, digits.targets

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

    def _resume(self, checkpoint: Found) -> None:
        found = checkpoint.made_with
        for field in fields(self.settings):
            wanted = getattr(self.settings, field.name)
            if found.get(field.name) != wanted:
                option = f"--{field.name.replace('_', '-')}"
                raise CheckpointError(
                    f"{checkpoint.path} was made with {option} {found.get(field.name)}, and this run "
                    f"has {option} {wanted}. Use the same, or another folder for --checkpoints."
                )
        state = self._state()
        random = state[f"random numbers of rank {self.rank}"]
        alike = (found["ranks"], found["device"]) == (self.ranks, self.device.type)
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
            if self.device.type in random and self.device.type != "cpu":
                module = torch.get_device_module(self.device)
                module.set_rng_state(random[self.device.type], self.device)


def _device(cpu: bool) -> torch.device:
    """This rank's own GPU if each rank of this machine has one, else the CPU."""
    kind = "cpu" if cpu else machine.device_type()
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    torch.accelerator.set_device_index(device.index)
    return device
