"""Which GPU each rank of a group uses: NCCL refuses two ranks on the same one.

It compares hosts and GPUs when it makes a communicator, at the first collective of a group on each
of a rank's GPUs, and at the first message between two ranks. Here a rank claims its GPU in the
group's store then, and waits for nobody, so that only the second of two is refused.
"""

import collections
import os
import socket
import weakref

import torch.distributed as dist

from vgpu.memory.gpus import VirtualGPU


class _Communicators:
    """Of one group, as this rank makes them."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self._store = store
        self._number = number
        self._made: set[tuple[int, int] | int] = set()
        self._of_gpus = 0

    def use(self, rank: int, peer: int | None, gpu: VirtualGPU) -> None:
        key = gpu.index if peer is None else (min(rank, peer), max(rank, peer))
        if key in self._made:
            return
        # The second GPU of each rank is in the group's second communicator, whatever its number.
        name = f"the {self._of_gpus}." if peer is None else str(key)
        place = f"vccl/{self._number}/{name}/{_place(gpu.index)}"
        first = int(self._store.compare_set(place, "", str(rank)))
        if first != rank:
            raise dist.DistBackendError(
                f"Duplicate GPU detected : rank {rank} and rank {first} both on CUDA device "
                f"{gpu.index}, which NCCL refuses: give each rank its own, with "
                "torch.cuda.set_device(local_rank) before the first tensor, or by the index of its "
                "device"
            )
        self._made.add(key)
        self._of_gpus += peer is None


_of_group: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Communicators]" = (
    weakref.WeakKeyDictionary()
)
_groups_made: collections.Counter[str] = collections.Counter()  # their names come again


def expect(group: dist.ProcessGroup, store: dist.Store) -> None:
    """From now on, no two ranks of this group may use the same GPU."""
    if group not in _of_group:
        name = str(group.group_name)
        _groups_made[name] += 1
        _of_group[group] = _Communicators(store, _groups_made[name])


def use(group: dist.ProcessGroup, gpu: VirtualGPU, peer: int | None = None) -> None:
    """Take part on this GPU; peer: for a message, the rank at its other end.

    DistBackendError where another rank of the group is on the same GPU of the same host, and where
    the group was made for another GPU than this one.
    """
    bound = group.bound_device_id
    if bound is not None and bound.index != gpu.index:
        raise dist.DistBackendError(
            "Attempt to perform collective on tensor not on device passed to init_process_group: the "
            f"tensor is on CUDA device {gpu.index}, and the group of rank {group.rank()} has "
            f"device_id {bound.index}. Call torch.cuda.set_device(local_rank) before the first tensor."
        )
    if group in _of_group:
        _of_group[group].use(group.rank(), peer, gpu)


def _place(index: int) -> str:
    """The GPU of this number, as other processes would find it; an agent of torchrun is a host."""
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = shown[index] if index < len(shown) else index
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}/{number}"
