"""Process groups for tensors on virtual GPUs, and what builds on them: DTensor, DDP, FSDP2.

The backend ``vccl`` is to ``vgpu`` what ``nccl`` is to ``cuda``: the device type's default.
Underneath, gloo carries the bytes (dispatch.py). Since that needs a CPU backend, a ``vccl`` group
also accepts CPU tensors, which NCCL would reject. Features that only NCCL has are emulated or
rejected here.

The second half of the file has the patches for DTensor, DDP, FSDP2, pipelines and symmetric memory.
"""

import collections
import functools
import inspect
import itertools
import os
import socket
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from vgpu import torch_releases
from vgpu.collectives.table import Call
from vgpu.memory import gpus
from vgpu.memory.blocks import Block
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.methods import cpp_device
from vgpu.tensor.refusals import is_virtual_device, refusing_virtual
from vgpu.tensor.tensor import VirtualTensor, wrap
from vgpu.torch_patches.undo import Changes

BACKEND = "vccl"
"""The backend for virtual GPUs, as ``nccl`` is for CUDA GPUs."""

_CPU = torch.device("cpu")

ranks_are_absent = False
"""Whether the other ranks of new groups are absent; ``cluster`` sets this for its block."""


def install(changes: Changes) -> None:
    backends: Any = dist.Backend
    plugin = backends._BackendPlugin(_make_backend, extended_api=True)
    changes.set(backends, BACKEND.upper(), BACKEND)
    changes.set(backends, "backend_list", [*backends.backend_list, BACKEND])
    changes.item(backends._plugins, BACKEND.upper(), plugin)
    changes.item(backends.backend_type_map, BACKEND, dist.ProcessGroup.BackendType.CUSTOM)
    changes.item(backends.backend_capability, BACKEND, [gpus.DEVICE_TYPE])
    changes.item(backends.default_device_backend_map, gpus.DEVICE_TYPE, BACKEND)
    # A script may ask for gloo by name, since gloo accepts CUDA tensors, too.
    gloo = backends.backend_capability["gloo"]
    changes.item(backends.backend_capability, "gloo", [*gloo, gpus.DEVICE_TYPE])
    changes.wrap(distributed_c10d, "_new_process_group_helper", _with_the_cpu)
    changes.wrap(distributed_c10d, "_get_split_source", _never_gloo)
    coalescing = _coalescing(distributed_c10d._coalescing_manager)
    for module in (distributed_c10d, dist):
        changes.set(module, "_coalescing_manager", coalescing)
    split_group = _splitting(distributed_c10d.split_group)
    for module in (distributed_c10d, dist, dist.device_mesh):
        changes.set(module, "split_group", split_group)
    changes.wrap(dist.Work, "get_future", _with_virtual_future)
    changes.wrap(dist.Work, "result", _with_virtual_result)
    _install_wrappers(changes)


def _make_backend(options: Any, backend_options: object) -> Any:
    """Create a ``vccl`` group's backend: gloo, or a fake one if the other ranks are absent."""
    if ranks_are_absent:
        from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

        # A fake group needs only a rank and a size.
        return FakeProcessGroup._create_internal(  # type: ignore[call-arg, unused-ignore]
            options.group_rank, options.group_size, None
        )
    if not dist.is_gloo_available():
        raise RuntimeError(
            "process groups of virtual GPUs need gloo, which this build of PyTorch lacks"
        )
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )


def _with_the_cpu(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that creates all groups; those of virtual GPUs also accept CPU tensors."""

    @functools.wraps(plain)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind(*args, **kwargs).arguments
        _refuse_nccl(str(given.get("backend")), given.get("backend_options"))
        group, *others = plain(*args, **kwargs)
        types: set[str] = set()
        if isinstance(group, dist.ProcessGroup):
            types = {device.type for device in group._device_types}
        if gpus.DEVICE_TYPE in types:
            torch_releases.name_default_backend(group, dist.ProcessGroup.BackendType.CUSTOM)
        # With absent ranks, CPU tensors are rejected, as with NCCL.
        if gpus.DEVICE_TYPE in types and not ranks_are_absent:
            if _CPU.type not in types:
                backend = group._get_backend(torch.device(gpus.DEVICE_TYPE))
                custom = dist.ProcessGroup.BackendType.CUSTOM
                group._register_backend(_CPU, custom, backend)
            name = str(group.group_name)
            _groups_made[name] += 1
            # gloo, if asked for by name, lets ranks share a GPU.
            vccl = f"{gpus.DEVICE_TYPE}:{BACKEND}" in dist.get_backend_config(group)
            _comparisons[group] = _Comparison(
                others[0], f"{name}/{_groups_made[name]}", shares_gpus=not vccl
            )
        return (group, *others)

    return new_process_group


def _refuse_nccl(backend: str, options: object) -> None:
    """Reject NCCL without CUDA, and options for ``vccl``, with errors that say what to do."""
    if "nccl" in backend and not torch.cuda.is_available():
        raise RuntimeError(
            f"the backend {backend} needs CUDA GPUs, and there are only virtual ones: leave out "
            f"the backend, use {BACKEND!r}, or run the script with "
            f"python -m vgpu --cuda-is-vgpu, which reads nccl as {BACKEND} in the "
            "program's own files"
        )
    if BACKEND in backend and options is not None:
        kind = type(options)
        raise NotImplementedError(
            f"pg_options is a {kind.__module__}.{kind.__qualname__}, and virtual GPUs' "
            f"backend {BACKEND} takes no options: leave out pg_options"
        )


def _never_gloo(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that picks a backend for ``new_group`` to split, so it never picks gloo.

    Since torch 2.15, ``new_group`` calls methods of that backend that only NCCL has.
    """

    @functools.wraps(plain)
    def source(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        return None if isinstance(found, dist.ProcessGroupGloo) else found

    return source


def _coalescing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_coalescing_manager`` so that it gets no device.

    With a device, it starts and ends a group of calls with methods that only NCCL has. Without
    one, it issues collectives of the same kind together, and others one by one.
    """

    @functools.wraps(plain)
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return plain(group, None if is_virtual_device(device) else device, async_ops)

    return manager


def _splitting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``split_group``, which a DeviceMesh calls if the group was created with ``device_id``.

    C++ would split each device's gloo backend separately; the two would rendezvous under one name.
    """

    @functools.wraps(plain)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind(*args, **kwargs).arguments
        parent = given.get("parent_pg") or dist.group.WORLD
        splits = given.get("split_ranks")
        if not splits or BACKEND not in dist.get_backend_config(parent):
            return plain(*args, **kwargs)
        everyone = dist.get_process_group_ranks(parent)
        groups = [
            dist.new_group(
                sorted(everyone[rank] for rank in ranks),
                timeout=given.get("timeout"),
                backend=given.get("backend") or dist.get_backend(parent),
                pg_options=given.get("pg_options"),
                group_desc=given.get("group_desc"),
                # Only ranks of the parent group take part.
                use_local_synchronization=len(everyone) < dist.get_world_size(),
            )
            for ranks in splits
        ]
        outside = dist.GroupMember.NON_GROUP_MEMBER
        return next((group for group in groups if group is not outside), outside)

    return split_group


# What ranks compare: NCCL rejects two ranks on the same GPU, and dtypes must match


class _Comparison:
    """What a rank compares with the other ranks of its group, through the group's store."""

    def __init__(self, store: dist.Store, name: str, shares_gpus: bool) -> None:
        self.store = store
        self.name = name
        self.needs_claim = not shares_gpus
        """Whether this rank still has to claim its GPU."""
        self.numbers = itertools.count()
        """Numbers the collectives on virtual tensors."""
        self.written = [""] * _KEYS
        """What each key held when this rank last read it."""


_KEYS = 256
"""How many collectives a rank may be ahead of a rank that hasn't compared its dtypes yet."""

_comparisons: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Comparison]" = (
    weakref.WeakKeyDictionary()
)
_groups_made: collections.Counter[str] = collections.Counter()  # by name; names are reused


def claim_gpu(group: dist.ProcessGroup, gpu: VirtualGPU) -> None:
    """Claim this GPU for this rank in a group.

    Raises DistBackendError if another rank of the group has claimed the same GPU of the same host,
    or if the group was created for a different GPU. NCCL compares GPUs when it creates a
    communicator, which it does for each of a rank's GPUs. Here, a rank writes the first GPU that it
    uses to the group's store, without waiting for others, so only the second of two ranks gets an
    error.
    """
    bound = group.bound_device_id
    if bound is not None and bound.index != gpu.index:
        raise dist.DistBackendError(
            "Attempt to perform collective on tensor not on device passed to init_process_group: "
            f"the tensor is on CUDA device {gpu.index}, and rank {group.rank()}'s group has "
            f"device_id {bound.index}. Call torch.cuda.set_device(local_rank) before creating "
            "tensors."
        )
    comparison = _comparisons.get(group)
    if comparison is None or not comparison.needs_claim:
        return
    key, rank = f"vccl/{comparison.name}/{_physical_gpu(gpu.index)}", group.rank()
    first = int(comparison.store.compare_set(key, "", str(rank)))
    if first != rank:
        raise dist.DistBackendError(
            f"Duplicate GPU detected : rank {rank} and rank {first} both on CUDA device "
            f"{gpu.index}, which NCCL rejects: use a different GPU on each rank. Call "
            "torch.cuda.set_device(local_rank) before creating tensors, or include the GPU's index "
            "in their device"
        )
    comparison.needs_claim = False


def compare_dtypes(call: Call) -> None:
    """Raise TypeError if another rank passes a different dtype to the same collective.

    NCCL and gloo compare at most sizes in bytes, so float16 on one rank and bfloat16 on another
    would give meaningless numbers. The first rank to issue a collective writes its dtypes to the
    group's store without waiting, and the others compare theirs with those. The keys are reused,
    so the store doesn't grow.
    """
    comparison = _comparisons.get(call.group)
    if comparison is None or call.peer is not None:
        return
    dtypes = dict.fromkeys(str(tensor.dtype) for tensor in [*call.inputs, *call.outputs])
    number, rank = next(comparison.numbers), call.group.rank()
    own = [str(number), call.name, ", ".join(dtypes), str(rank)]
    key = f"vccl/{comparison.name}/dtypes/{number % _KEYS}"
    last = comparison.written[number % _KEYS]
    try:
        written = comparison.store.compare_set(key, last, "/".join(own)).decode()
    except dist.DistError:  # the rank that serves the store has exited; groups outlive it
        del _comparisons[call.group]
        return
    comparison.written[number % _KEYS] = written
    first = written.split("/")
    if first[:2] == own[:2] and first[2] != own[2]:
        raise TypeError(
            f"{call.name}: rank {rank} of the group passes {own[2]}, but rank {first[3]} passes "
            f"{first[2]}. NCCL doesn't compare dtypes, and would return meaningless numbers: pass "
            "the same dtype on all ranks"
        )


def _physical_gpu(index: int) -> str:
    """Return the GPU's name, the same in all processes; each torchrun agent counts as a host."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = visible[index] if index < len(visible) else index
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}/{number}"


# gloo's futures hold the CPU tensors inside virtual ones


def _virtual(value: Any) -> Any:
    """Wrap a tensor as one on the GPU that its storage is on; return anything else unchanged."""
    if not isinstance(value, torch.Tensor) or isinstance(value, VirtualTensor):
        return value
    if value.layout is not torch.strided or value.device.type != "cpu":
        return value
    block: Block | None = getattr(value.untyped_storage(), "_vgpu_block", None)
    if block is None:  # a CPU tensor
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


# Patches for DTensor, DDP, FSDP2, pipelines and symmetric memory
#
# In C++, wrappers of virtual tensors, such as DTensors and the results of functional collectives,
# must be on the device type for which autograd has a queue (memory/gpus.py); Python shows the
# virtual device. A wrapper class is patched when its first tensor is created or, if C++ creates
# that tensor, when the class's module is imported. Enabling virtual GPUs imports none of these
# modules.


def _install_wrappers(changes: Changes) -> None:
    make = functools.partial(_naming_device, changes=changes, seen=set())
    changes.set(
        torch.Tensor,
        "_make_wrapper_subclass",
        staticmethod(make(torch.Tensor._make_wrapper_subclass)),
    )
    changes.when_imported("torch.distributed.tensor._api", _show_device_of_dtensors)
    changes.when_imported("torch.distributed.tensor._random", _read_offset)
    changes.when_imported("torch.distributed.pipelining.schedules", _without_votes)
    changes.when_imported("torch.distributed._symmetric_memory", _refuse_symmetric_memory)
    changes.when_imported(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives", _divide_beside_sum
    )
    changes.wrap(DistributedDataParallel, "_ddp_init_helper", _without_times)


def _naming_device(
    plain: Callable[..., torch.Tensor], *, changes: Changes, seen: set[type]
) -> Callable[..., torch.Tensor]:
    """Wrap ``Tensor._make_wrapper_subclass``, for wrappers whose device is a virtual GPU."""

    @functools.wraps(plain)
    def make(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        by_position = len(args) > _DEVICE_POSITION
        device = args[_DEVICE_POSITION] if by_position else kwargs.get("device")
        gpu = gpus.resolve(device) if isinstance(device, torch.device) else None
        if gpu is None or issubclass(cls, VirtualTensor):
            return plain(cls, *args, **kwargs)
        if cls not in seen:
            seen.add(cls)
            _show_device(cls, changes)
        if by_position:  # as FunctionalTensor does
            before, after = args[:_DEVICE_POSITION], args[_DEVICE_POSITION + 1 :]
            return plain(cls, *before, gpu.cpp_device, *after, **kwargs)
        return plain(cls, *args, **{**kwargs, "device": gpu.cpp_device})

    return make


_DEVICE_POSITION = 6  # among the arguments of Tensor._make_wrapper_subclass after the class
_cpp_device_of = torch._C.TensorBase.device.__get__


def _device(tensor: torch.Tensor) -> torch.device:
    return gpus.shown(_cpp_device_of(tensor))


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call ``Tensor.to``, which compares devices in C++ and so needs the C++ device."""
    if "device" in kwargs:
        kwargs["device"] = cpp_device(kwargs["device"])
    elif args:
        args = (cpp_device(args[0]), *args[1:])
    return torch.Tensor.to(tensor, *args, **kwargs)


_SHOWING_DEVICE: dict[str, Any] = {"device": property(_device), "to": _to}


def _show_device(cls: type, changes: Changes) -> None:
    for name, attribute in _SHOWING_DEVICE.items():
        if getattr(cls, name) is getattr(torch.Tensor, name):
            changes.set(cls, name, attribute)


def _show_device_of_dtensors(module: ModuleType, changes: Changes) -> None:
    _show_device(module.DTensor, changes)


# Random numbers of DTensors


def _read_offset(module: ModuleType, changes: Changes) -> None:
    """Let DTensor, which sets a generator's offset per shard, find it at the end of vgpu's state.

    torch reads a state of 16 bytes, as in CUDA's generator: a seed, then an offset.
    """

    class PhiloxState(module._PhiloxState):  # type: ignore[name-defined]
        @property
        def offset(self) -> torch.Tensor:
            if len(self._state) == gpus.PHILOX_BYTES:
                offset: torch.Tensor = super().offset
                return offset
            return gpus.offset_in(self._state)

        @offset.setter
        def offset(self, offset: torch.Tensor) -> None:
            if len(self._state) == gpus.PHILOX_BYTES:
                self._state[8:] = offset.view(torch.uint8)
            else:
                gpus.set_offset_in(self._state, int(offset))

    changes.set(module, "_PhiloxState", PhiloxState)


# DistributedDataParallel

ddp_groups: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Groups over which DDP reduces gradients; not their names, because names are reused."""


def _without_times(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Turn off DDP's timings; C++ supports them only on the CPU and CUDA, and warns otherwise."""

    @functools.wraps(plain)
    def helper(ddp: Any, *args: Any, **kwargs: Any) -> None:
        plain(ddp, *args, **kwargs)
        ddp_groups.add(ddp.process_group)
        if ddp.device_type == gpus.DEVICE_TYPE:
            ddp.logger = _LoggerWithoutTimes(ddp.logger)

    return helper


class _LoggerWithoutTimes:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: there are no times to log."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


# Pipeline schedules


def _without_votes(module: ModuleType, changes: Changes) -> None:
    schedule = module._PipelineSchedule
    if torch_releases.votes_in_warm_up(schedule):
        changes.wrap(schedule, "_warmup_p2p", _alone)
    else:
        changes.wrap(schedule, "_initialize_pipeline_distributed_state", _as_a_fake_group)


def _as_a_fake_group(plain: Callable[..., None]) -> Callable[..., None]:
    """Make a schedule skip its vote if the other ranks are absent, as it does with a fake group.

    Before its first step, a schedule has all stages vote, by an all-reduce of values, on whether
    their sizes are known (``input_args`` and ``output_args``), and warms up their connections. With
    torch's own fake process group, it skips both, and says which stage's sizes are missing.
    """

    @functools.wraps(plain)
    def initialize(*args: Any, **kwargs: Any) -> None:
        if not ranks_are_absent:
            return plain(*args, **kwargs)
        with mock.patch.object(dist, "get_backend", lambda group=None: "fake"):
            return plain(*args, **kwargs)

    return initialize


def _alone(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def warm_up(*args: Any, **kwargs: Any) -> None:
        absent = ranks_are_absent
        return (torch_releases.warm_up_alone if absent else plain)(*args, **kwargs)

    return warm_up


# FSDP2


def _divide_beside_sum(module: ModuleType, changes: Changes) -> None:
    changes.wrap(module, "_get_gradient_divide_factors", _without_premultiplied_sum)


def _without_premultiplied_sum(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap FSDP2's choice of how to average, to avoid the premultiplied sum, which gloo lacks.

    Where ``set_gradient_divide_factor`` would use one, FSDP2 divides the gradients itself and then
    sums them, as with ``set_force_sum_reduction_for_comms``.
    """

    @functools.wraps(plain)
    def factors(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        call = inspect.signature(plain).bind(*args, **kwargs)
        if call.arguments.get("device_type") != gpus.DEVICE_TYPE:
            return found
        if not any(_is_premultiplied(value) for value in found):
            return found
        call.arguments["force_sum_reduction_for_comms"] = True
        return plain(*call.args, **call.kwargs)

    return factors


def _is_premultiplied(value: Any) -> bool:
    return isinstance(value, dist.ReduceOp) and value == dist.ReduceOp.PREMUL_SUM


# Symmetric memory

_SYMMETRIC = (
    "torch.distributed._symmetric_memory needs GPUs that read each other's memory, and virtual "
    "GPUs of different ranks can't: use the collectives of torch.distributed, such as all_reduce"
)


def _refuse_symmetric_memory(module: ModuleType, changes: Changes) -> None:
    for name in ("empty", "rendezvous", "get_mempool_allocator"):
        changes.wrap(module, name, refusing_virtual(_SYMMETRIC))
