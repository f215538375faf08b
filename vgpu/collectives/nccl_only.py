"""What only NCCL, and GPUs that read each other's memory, offer: done another way, or refused."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vgpu.collectives.process_groups import BACKEND
from vgpu.memory import gpus
from vgpu.tensor.operator_info import handler
from vgpu.tensor.operators import Args, Kwargs, Operator
from vgpu.tensor.refusals import is_virtual_device
from vgpu.torch_patches.imported import when_imported
from vgpu.torch_patches.undo import Changes

_SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"


def prepare() -> None:
    """Look up now what ``install`` needs, where all that it depends on has been imported."""
    if _SYMMETRIC_MEMORY in sys.modules:
        _symmetric_operators()


def install(changes: Changes) -> None:
    if not dist.is_available():
        return
    changes.wrap(distributed_c10d, "_new_process_group_helper", _explaining_nccl)
    changes.wrap(distributed_c10d, "_get_split_source", _never_gloo)
    coalescing = _coalescing(distributed_c10d._coalescing_manager)
    for module in (distributed_c10d, dist):
        changes.set(module, "_coalescing_manager", coalescing)
    split_group = _splitting(distributed_c10d.split_group)
    for module in (distributed_c10d, dist, dist.device_mesh):
        changes.set(module, "split_group", split_group)
    when_imported(_SYMMETRIC_MEMORY, _refuse_symmetric_memory, changes)
    when_imported(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives", _divide_beside_sum, changes
    )


# Groups


def _explaining_nccl(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What makes every group; where there is no CUDA, NCCL's own words would not say what to do."""

    @functools.wraps(plain)
    def explained(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind(*args, **kwargs).arguments
        wanted = str(given.get("backend"))
        if "nccl" in wanted and not torch.cuda.is_available():
            raise RuntimeError(
                f"the backend {wanted} needs CUDA GPUs, and there are only virtual ones: leave the "
                f"backend out, name {BACKEND!r}, or run the script with "
                f"python -m vgpu --cuda-is-vgpu, which reads nccl as {BACKEND} where it "
                "stands in the program's own files"
            )
        options = given.get("backend_options")
        if BACKEND in wanted and options is not None:
            kind = type(options)
            raise NotImplementedError(
                f"pg_options is a {kind.__module__}.{kind.__qualname__}, and the backend {BACKEND} "
                "of virtual GPUs has no options: leave pg_options out there"
            )
        return plain(*args, **kwargs)

    return explained


def _never_gloo(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The backend that ``new_group`` splits; it calls on gloo, since 2.15, what only NCCL has."""

    @functools.wraps(plain)
    def source(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        return None if isinstance(found, dist.ProcessGroupGloo) else found

    return source


def _coalescing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``_coalescing_manager``; given a device, it has the group start and end, as only NCCL does.

    Without one it sends collectives of a kind together, and others each by itself.
    """

    @functools.wraps(plain)
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return plain(group, None if is_virtual_device(device) else device, async_ops)

    return manager


def _splitting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``split_group``, which a DeviceMesh calls where the group was made with ``device_id``.

    C++ would split the gloo of each device by itself, and have both meet under one name.
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
                # Nobody outside of the parent takes part.
                use_local_synchronization=len(everyone) < dist.get_world_size(),
            )
            for ranks in splits
        ]
        outside = dist.GroupMember.NON_GROUP_MEMBER
        return next((group for group in groups if group is not outside), outside)

    return split_group


# Symmetric memory


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: symmetric memory needs GPUs that read each other's memory, and virtual GPUs of "
        "different ranks do not; use the collectives of torch.distributed, such as all_reduce"
    )


def _refuse_symmetric_memory(module: ModuleType, changes: Changes) -> None:
    for name in ("empty", "rendezvous"):
        changes.wrap(module, name, _refusing_virtual)
    handler(*_symmetric_operators())(_refused_operator)


@functools.cache
def _symmetric_operators() -> set[str]:
    """Those of the module; to be called once it has been imported."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.partition(".")[0] for name in names if name.startswith("symm_mem::")}


def _refusing_virtual(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of symmetric memory, which gets a device or a tensor."""

    @functools.wraps(plain)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        places = [kwargs.get("device"), *(v.device for v in args if isinstance(v, torch.Tensor))]
        for device in places:
            if is_virtual_device(device):
                _refuse(f"{plain.__name__}() on {device}")
        return plain(*args, **kwargs)

    return refusing


def _refused_operator(func: Operator, args: Args, kwargs: Kwargs) -> NoReturn:
    _refuse(func._schema.name)


# FSDP2


def _divide_beside_sum(module: ModuleType, changes: Changes) -> None:
    changes.wrap(module, "_get_gradient_divide_factors", _without_premultiplied_sum)


def _without_premultiplied_sum(plain: Callable[..., Any]) -> Callable[..., Any]:
    """How FSDP2 averages; gloo has no sum of products, as ``set_gradient_divide_factor`` asks for.

    Then FSDP2 divides by itself and sums, as ``set_force_sum_reduction_for_comms`` makes it do.
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
