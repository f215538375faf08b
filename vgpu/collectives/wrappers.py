"""Patches for DTensor, DDP, FSDP2, pipelines and symmetric memory on virtual GPUs.

In C++, wrappers of virtual tensors, such as DTensors and the results of functional collectives,
must be on the device type for which autograd has a queue (memory/gpus.py); Python shows the virtual
device. Such a class is patched when its first tensor is created or, if C++ creates that tensor,
when the class's module is imported. Enabling virtual GPUs imports none of these modules.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vgpu import torch_releases
from vgpu.collectives import process_groups
from vgpu.memory import gpus
from vgpu.tensor import compute
from vgpu.tensor.methods import cpp_device
from vgpu.tensor.refusals import refusing_virtual
from vgpu.tensor.tensor import VirtualTensor
from vgpu.torch_patches.undo import Changes


def install(changes: Changes) -> None:
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
    """Make DTensor, which sets a generator's offset per shard, find it at the end of vgpu's state.

    torch reads a state of 16 bytes, as in CUDA's generator: a seed, then an offset.
    """

    class PhiloxState(module._PhiloxState):  # type: ignore[name-defined]
        @property
        def offset(self) -> torch.Tensor:
            if len(self._state) == compute.PHILOX_BYTES:
                offset: torch.Tensor = super().offset
                return offset
            return compute.offset_in(self._state)

        @offset.setter
        def offset(self, offset: torch.Tensor) -> None:
            if len(self._state) == compute.PHILOX_BYTES:
                self._state[8:] = offset.view(torch.uint8)
            else:
                compute.set_offset_in(self._state, int(offset))

    changes.set(module, "_PhiloxState", PhiloxState)


# DistributedDataParallel

ddp_groups: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Groups over which a DistributedDataParallel reduces gradients; not names, as those are reused."""


def _without_times(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Turn off DDP's timings; C++ has them only for the CPU and CUDA, and warns otherwise."""

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
        if not process_groups.ranks_are_absent:
            return plain(*args, **kwargs)
        with mock.patch.object(dist, "get_backend", lambda group=None: "fake"):
            return plain(*args, **kwargs)

    return initialize


def _alone(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def warm_up(*args: Any, **kwargs: Any) -> None:
        absent = process_groups.ranks_are_absent
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
