"""Process groups for tensors of virtual GPUs: the backend ``vccl``.

It is to ``vgpu`` what ``nccl`` is to ``cuda``: the default for the device type. Beneath it gloo
carries the bytes, because the operators of a process group (``torch.ops.c10d``) reach a virtual
tensor's dispatch like any other and go on with the CPU tensors inside. For them the group needs a
CPU backend as well, so a ``vccl`` group also takes CPU tensors, where NCCL would refuse them.

Left out: what only NCCL offers (nccl_only.py).
"""

import collections
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from helpers.vgpu.changes import Changes
from helpers.vgpu.device import gpus
from helpers.vgpu.dispatch import rules
from helpers.vgpu.dispatch.operations import compute
from helpers.vgpu.dispatch.operators import Args, Kwargs, Operator, named_arguments
from helpers.vgpu.dispatch.tensor import VirtualTensor
from helpers.vgpu.distributed.ddp import process_groups
from helpers.vgpu.distributed.lent import Lent, take_back
from helpers.vgpu.distributed.nccl_only import BACKEND
from helpers.vgpu.timing.lanes import in_backward
from helpers.vgpu.timing.traits import tensors_in

_CPU = torch.device("cpu")

# Operators of process groups, whose calls and bytes are counted.
_NAMESPACES = ("c10d::", "_c10d_functional::")
WAITS = ("wait_tensor", "wait_tensors")
_NOT_COUNTED = (*WAITS, "_wrap_tensor_autograd", "check_for_nan")


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


ranks_are_absent = False
"""Whether the other ranks of new groups do not exist: a virtual cluster (cluster/) is open."""


def _make_backend(options: Any, backend_options: object) -> Any:
    """What ``init_process_group`` calls for ``vccl``: gloo."""
    if ranks_are_absent:
        from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

        # It only has a rank and a size.
        return FakeProcessGroup._create_internal(options.group_rank, options.group_size, None)
    if not dist.is_gloo_available():
        raise RuntimeError("process groups of virtual GPUs need gloo, and this torch has none")
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )


def _with_the_cpu(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What makes every group; one for virtual GPUs takes CPU tensors too, the same way."""

    @functools.wraps(plain)
    def made(*args: Any, **kwargs: Any) -> Any:
        group, *others = plain(*args, **kwargs)
        # Of absent ranks, CPU tensors are refused, as NCCL refuses them.
        if isinstance(group, dist.ProcessGroup) and not ranks_are_absent:
            types = {device.type for device in group._device_types}
            if gpus.DEVICE_TYPE in types and group.name() == "undefined":
                # Before torch 2.13, one of several backends; C++ warns where it finds no default.
                group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            if gpus.DEVICE_TYPE in types and _CPU.type not in types:
                backend = group._get_backend(torch.device(gpus.DEVICE_TYPE))
                custom = dist.ProcessGroup.BackendType.CUSTOM
                group._register_backend(_CPU, custom, backend)
        return (group, *others)

    return made


# Counting


class Tally:
    """The collectives that this process has taken part in with virtual tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()

    def add(self, name: str, size_bytes: int) -> None:
        with self._lock:
            self.calls[name] += 1
            self.bytes[name] += size_bytes


tally = Tally()
"""By name, as in "all_reduce": how often, and the bytes of the tensors that this rank put in."""


def _counted(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    name = plain_name(func)
    if ranks_are_absent:
        raise RuntimeError(
            f"{name} of a tensor with values, but the other ranks of this virtual cluster do not "
            "exist and have none: make the tensor, or move it to its GPU, in a vgpu.shapes_only() "
            "block"
        )
    if func._schema.name in _OF_CONTIGUOUS:
        _check_contiguous(args[0])
    tally.add(name, _bytes_put_in(func, args, kwargs))
    lent = Lent(name)
    result = lent.own(compute(func, lent.lend(args), kwargs))
    if not func._schema.name.startswith("c10d::"):
        lent.with_tensors(result)
        return result
    named = named_arguments(func, args, kwargs)
    result = list(result) if isinstance(result, list | tuple) else [result]
    if named.get("async_op") is False:
        lent.waited_for(result)
    elif not (in_backward() and dist.ProcessGroup.unbox(named["process_group"]) in process_groups):
        lent.until_dropped(dist.Work.unbox(result[-1]))
    return tuple(result) if len(result) > 1 else result[0]


# Where NCCL's group looks at it first (check_gpu_single_tensor in ProcessGroupNCCL.cpp).
_OF_CONTIGUOUS = {"c10d::allreduce_", "c10d::broadcast_", "c10d::reduce_"}


def _check_contiguous(tensors: Iterable[torch.Tensor]) -> None:
    """ValueError of NCCL's, which reads a tensor as a row of numbers; channels-last is one, too."""
    for tensor in tensors:
        if type(tensor) is not VirtualTensor or tensor.layout is not torch.strided:
            continue
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
        if not (
            tensor.is_contiguous()
            or (channels_last and tensor.is_contiguous(memory_format=channels_last))
        ):
            raise ValueError("Tensors must be contiguous")


def _waited(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """``wait_tensor`` and ``wait_tensors``."""
    result = compute(func, args, kwargs)
    for tensor in tensors_in(args):
        if type(tensor) is VirtualTensor:
            take_back(tensor)
    return result


def _counted_flat(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """NCCL reads the one large tensor as a row of numbers; gloo would cut its first dimension."""
    large, small, *others = args
    flat = [t.view(-1) if t.is_contiguous() else t for t in (large, small)]
    _, work = _counted(func, (*flat, *others), kwargs)
    return large, work


_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_into_tensor": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather_into_tensor": "gather",
    "recv_any_source": "recv",
    "isend": "send",
    "irecv": "recv",
}


def plain_name(func: Operator) -> str:
    """The name that torch.distributed gives a collective, whichever operator runs it."""
    bare = func._schema.name.partition("::")[2]
    bare = bare.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    return _NAMES.get(bare, bare)


# What a rank puts in; where there is none of these, all its tensors.
_INPUTS = ("input_tensors", "input_tensor", "input", "inputs", "input_list")


def _bytes_put_in(func: Operator, args: Args, kwargs: Kwargs) -> int:
    named = named_arguments(func, args, kwargs)
    values = [named[name] for name in _INPUTS if name in named] or list(named.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(values))


def operators() -> list[str]:
    """The operators of process groups that move tensors."""
    names = torch._C._dispatch_get_all_op_names()
    wanted = {name.partition(".")[0] for name in names if name.startswith(_NAMESPACES)}
    return [name for name in wanted if not name.endswith(_NOT_COUNTED)]


rules.use_handlers(dict.fromkeys(operators(), _counted))
rules.use_handlers({f"_c10d_functional::{name}": _waited for name in WAITS})
rules.use_handlers(
    dict.fromkeys(("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"), _counted_flat)
)
