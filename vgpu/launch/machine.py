"""What this machine has for its ranks: cores, GPUs, and a network that stays inside."""

import os
import random
import socket
from contextlib import suppress

import torch
import torch.distributed as dist

import vgpu


def cores() -> int:
    """Cores that this process may use; a scheduler or a container can limit them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Each rank's share of the cores, at least 1, for ``torch.set_num_threads``."""
    return max(1, cores() // ranks)


def device_type(ranks: int | None = None) -> str:
    """What each of this machine's ranks has one of: "vgpu" where virtual GPUs are enabled, "cuda"
    where there are as many as ranks and NCCL to join them, else "cpu".

    Without a number the ranks are those that torchrun or ``launch.run`` has started on this machine.
    """
    if ranks is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if vgpu.is_enabled() and torch.get_device_module("vgpu").device_count() >= ranks:
        return "vgpu"
    return "cuda" if real_gpus_for(ranks) else "cpu"


def real_gpus_for(ranks: int) -> bool:
    """Whether each of so many ranks can have a real GPU of its own, with NCCL between them."""
    return dist.is_nccl_available() and torch.cuda.device_count() >= ranks


def backend(device_type: str) -> str:
    """What ``init_process_group`` takes for ranks whose tensors are on such devices."""
    return {"cuda": "cpu:gloo,cuda:nccl", "vgpu": "cpu:gloo,vgpu:vccl"}.get(device_type, "gloo")


def loopback() -> str | None:
    """The network interface on which this machine talks to itself; None if it has no name.

    Ranks of one machine use it (GLOO_SOCKET_IFNAME). Otherwise gloo looks up the machine's own
    name, which fails on some machines.
    """
    named = socket.if_nameindex() if hasattr(socket, "if_nameindex") else []
    return next((name for _, name in named if name in ("lo", "lo0")), None)


def free_port() -> int:
    """A port for ranks to meet at: free now, and none that systems give to others by themselves.

    Whoever asks for any port gets one above 32767 on Linux, above 49151 elsewhere. One of those may
    be gone before the ranks have started. Raises OSError if none of 100 is free.
    """
    tried = random.SystemRandom().sample(range(20_000, 30_000), 100)  # no seed of the user's
    for port in tried:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(
        "found no free port for the ranks: 100 between 20000 and 29999 are all taken. "
        "Name one yourself, with --master-port or --rdzv-endpoint."
    )
