"""``torch.vgpu.random``: seeds and states of the devices' generators."""

from collections.abc import Iterable
from typing import Any

import torch

from vgpu.memory import gpus
from vgpu.memory.gpus import meant_by
from vgpu.tensor import generators
from vgpu.torch_patches.submodules import missing

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    generators.default_generator(meant_by(None)).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator alike; ``torch.manual_seed`` calls it."""
    for index in range(gpus.device_count()):
        generators.default_generator(gpus.by_index(index)).manual_seed(seed)


def seed() -> None:
    """Seed the current device's generator at random."""
    generators.default_generator(meant_by(None)).seed()


def seed_all() -> None:
    """Seed every device's generator at random, all alike."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return generators.default_generator(meant_by(None)).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of a device's generator, as a byte tensor on the CPU."""
    return generators.default_generator(meant_by(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    generators.default_generator(meant_by(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(gpus.device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


__getattr__ = missing.of("random")
