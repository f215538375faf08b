"""Process groups for tensors of virtual GPUs: the backend ``vccl``.

It is to ``vgpu`` what ``nccl`` is to ``cuda``: the default for the device type. Beneath it gloo
carries the bytes (dispatch.py). For CPU tensors the group needs a CPU backend as well, so a ``vccl``
group also takes those, where NCCL would refuse them.

Left out: what only NCCL offers (nccl_only.py).
"""

import collections
import functools
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

from vgpu import torch_releases
from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.tensor import VirtualTensor, wrap
from vgpu.torch_patches.undo import Changes

BACKEND = "vccl"
"""The backend of virtual GPUs, as ``nccl`` is that of CUDA's."""

_CPU = torch.device("cpu")

ranks_are_absent = False
"""Whether the other ranks of new groups do not exist: ``cluster`` sets it in its block."""


def install(changes: Changes) -> None:
    if not dist.is_available():
        return
    backends: Any = dist.Backend
    plugin = backends._BackendPlugin(_make_backend, extended_api=True)
    changes.set(backends, BACKEND.upper(), BACKEND)
    changes.set(backends, "backend_list", [*backends.backend_list, BACKEND])
    changes.item(backends._plugins, BACKEND.upper(), plugin)
    changes.item(backends.backend_type_map, BACKEND, dist.ProcessGroup.BackendType.CUSTOM)
    changes.item(backends.backend_capability, BACKEND, [gpus.DEVICE_TYPE])
    changes.item(backends.default_device_backend_map, gpus.DEVICE_TYPE, BACKEND)
    # A script may ask for gloo by name: it takes CUDA tensors too.
    gloo = backends.backend_capability["gloo"]
    changes.item(backends.backend_capability, "gloo", [*gloo, gpus.DEVICE_TYPE])
    changes.wrap(distributed_c10d, "_new_process_group_helper", _with_the_cpu)
    changes.wrap(dist.Work, "get_future", _with_virtual_future)
    changes.wrap(dist.Work, "result", _with_virtual_result)


def _make_backend(options: Any, backend_options: object) -> Any:
    """What ``init_process_group`` calls for ``vccl``: gloo."""
    if ranks_are_absent:
        from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

        # It only has a rank and a size.
        return FakeProcessGroup._create_internal(  # type: ignore[call-arg, unused-ignore]
            options.group_rank, options.group_size, None
        )
    if not dist.is_gloo_available():
        raise RuntimeError("process groups of virtual GPUs need gloo, and this torch has none")
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )


def _with_the_cpu(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What makes every group; one for virtual GPUs takes CPU tensors too, the same way."""

    @functools.wraps(plain)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        group, *others = plain(*args, **kwargs)
        types: set[str] = set()
        if isinstance(group, dist.ProcessGroup):
            types = {device.type for device in group._device_types}
        if gpus.DEVICE_TYPE in types:
            torch_releases.name_default_backend(group, dist.ProcessGroup.BackendType.CUSTOM)
        # Of absent ranks, CPU tensors are refused, as NCCL refuses them.
        if gpus.DEVICE_TYPE in types and not ranks_are_absent:
            if _CPU.type not in types:
                backend = group._get_backend(torch.device(gpus.DEVICE_TYPE))
                custom = dist.ProcessGroup.BackendType.CUSTOM
                group._register_backend(_CPU, custom, backend)
            # gloo by its own name lets ranks share a GPU.
            if f"{gpus.DEVICE_TYPE}:{BACKEND}" in dist.get_backend_config(group):
                _one_gpu_each(group, others[0])
        return (group, *others)

    return new_process_group


# Communicators: NCCL refuses two ranks on the same GPU


class _Communicators:
    """Which GPU each rank of a group uses, as this rank claims its own.

    NCCL compares hosts and GPUs when it makes a communicator, at the first collective of a group on
    each of a rank's GPUs, and at the first message between two ranks. Here a rank claims its GPU in
    the group's store then, and waits for nobody, so that only the second of two is refused.
    """

    def __init__(self, store: dist.Store, number: int) -> None:
        self._store = store
        self._number = number
        self._made: set[tuple[int, int] | int] = set()
        self._gpus_used = 0

    def claim(self, rank: int, peer: int | None, gpu: VirtualGPU) -> None:
        key = gpu.index if peer is None else (min(rank, peer), max(rank, peer))
        if key in self._made:
            return
        # The second GPU of each rank is in the group's second communicator, whatever its number.
        name = f"the {self._gpus_used}." if peer is None else str(key)
        claimed = f"vccl/{self._number}/{name}/{_physical_gpu(gpu.index)}"
        first = int(self._store.compare_set(claimed, "", str(rank)))
        if first != rank:
            raise dist.DistBackendError(
                f"Duplicate GPU detected : rank {rank} and rank {first} both on CUDA device "
                f"{gpu.index}, which NCCL refuses: give each rank its own, with "
                "torch.cuda.set_device(local_rank) before the first tensor, or by the index of its "
                "device"
            )
        self._made.add(key)
        self._gpus_used += peer is None


_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Communicators]" = (
    weakref.WeakKeyDictionary()
)
_groups_made: collections.Counter[str] = collections.Counter()  # their names come again


def _one_gpu_each(group: dist.ProcessGroup, store: dist.Store) -> None:
    """From now on, no two ranks of this group may use the same GPU."""
    if group not in _communicators:
        name = str(group.group_name)
        _groups_made[name] += 1
        _communicators[group] = _Communicators(store, _groups_made[name])


def claim_gpu(group: dist.ProcessGroup, gpu: VirtualGPU, peer: int | None = None) -> None:
    """Take part in a group on this GPU; peer: for a message, the rank at its other end.

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
    if group in _communicators:
        _communicators[group].claim(group.rank(), peer, gpu)


def _physical_gpu(index: int) -> str:
    """The GPU of this number, as other processes would find it; an agent of torchrun is a host."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = visible[index] if index < len(visible) else index
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}/{number}"


# Futures: gloo's hold the CPU tensors inside of virtual ones


def _virtual(value: Any) -> Any:
    """A tensor on the GPU whose memory counts its storage; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, VirtualTensor):
        return value
    if value.layout is not torch.strided or value.device.type != "cpu":
        return value
    block: Block | None = getattr(value.untyped_storage(), "_vgpu_block", None)
    if block is None:  # the CPU's own
        return value
    return wrap(value, gpus.by_index(block.memory.device.index), "get_future")


def _with_virtual_future(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def get_future(work: Any) -> Any:
        return plain(work).then(lambda done: pytree.tree_map(_virtual, done.value()))

    return get_future


def _with_virtual_result(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def result(work: Any) -> Any:
        return pytree.tree_map(_virtual, plain(work))

    return result
