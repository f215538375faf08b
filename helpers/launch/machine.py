"""What this machine has for its ranks: cores, GPUs, and a network that stays inside."""

import os
import socket

import torch
import torch.distributed as dist


def cores() -> int:
    """Cores that this process may use, which a scheduler or a container can make fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Each rank's share of the cores, at least 1, for ``torch.set_num_threads``."""
    return max(1, cores() // ranks)


def each_rank_has_a_gpu(ranks: int | None = None) -> bool:
    """Whether each of this machine's ranks can have a GPU of its own, with NCCL between them.

    Without a number they are as many as torchrun or ``launch.run`` has started on this machine.
    """
    if ranks is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return dist.is_nccl_available() and torch.cuda.device_count() >= ranks


def backend(on_gpus: bool) -> str:
    """What ``init_process_group`` takes: NCCL for tensors on GPUs, which it needs; gloo on CPUs."""
    return "cpu:gloo,cuda:nccl" if on_gpus else "gloo"


def loopback() -> str | None:
    """The network interface on which this machine talks to itself; None where it has no name.

    Ranks of one machine take it (GLOO_SOCKET_IFNAME); else gloo looks up the machine's own name,
    which some machines do not know.
    """
    named = socket.if_nameindex() if hasattr(socket, "if_nameindex") else []
    return next((name for _, name in named if name in ("lo", "lo0")), None)
