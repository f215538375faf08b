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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork
from torch.distributed import distributed_c10d

from vgpu.changes import Changes
from vgpu.collectives import checks, communicators
from vgpu.collectives.borrowed import Lent, done, take_back
from vgpu.collectives.call import Call
from vgpu.collectives.nccl_only import BACKEND
from vgpu.memory import gpus
from vgpu.tensor.operators import Args, Kwargs, Operator, tensors_in
from vgpu.tensor.tensor import VirtualTensor, run_unrecorded

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
            # gloo by its own name lets ranks share a GPU.
            if f"{gpus.DEVICE_TYPE}:{BACKEND}" in dist.get_backend_config(group):
                communicators.expect(group, others[0])
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


def counted(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    call = Call(func, args, kwargs)
    name = call.name
    if ranks_are_absent:
        raise RuntimeError(
            f"{name} of a tensor with values, but the other ranks of this virtual cluster do not "
            "exist and have none: make the tensor, or move it to its GPU, in a vgpu.shapes_only() "
            "block"
        )
    checks.check(call)
    gpu = next(tensor._gpu for tensor in tensors_in(args) if type(tensor) is VirtualTensor)
    communicators.use(call.group, gpu, call.peer)
    tally.add(name, _bytes_put_in(call))
    if call.operator == "c10d::allgather_" and len({part.shape for part in call.received}) > 1:
        return _gathered(call, args)
    return _carried(call, func, args, kwargs)


def _gathered(call: Call, args: Args) -> Any:
    """Parts of unequal sizes, by a broadcast of each, as NCCL does it; it ends before it returns."""
    outputs, (own,), group, *_ = args
    (parts,) = outputs
    mine = parts[call.group.rank()]
    run_unrecorded(
        torch.ops.aten.copy_.default, (mine.detach(), own), {}
    )  # in NCCL's kernel, none of its own
    broadcast = torch.ops.c10d.broadcast_.default
    for root, part in enumerate(parts):
        given = ([part], group, root, 0, False)
        _carried(Call(broadcast, given, {}), broadcast, given, {})
    return outputs, dist.Work.boxed(PythonCallbackWork(done))


def _carried(call: Call, func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """What gloo makes of it."""
    lent = Lent(call.name)
    given = args
    if call.operator in _OF_ROWS:
        given = (*(tensor.as_strided((tensor.numel(),), (1,)) for tensor in args[:2]), *args[2:])
    result = lent.own(run_unrecorded(func, lent.lend(given), kwargs))
    if not call.operator.startswith("c10d::"):
        lent.with_tensors(result)
        return result
    result = list(result) if isinstance(result, list | tuple) else [result]
    if call.operator in _OF_ROWS:
        result[0] = args[0]
    if call.named.get("async_op") is False:
        lent.waited_for(result)
    elif not call.is_for_ddp:
        lent.until_dropped(dist.Work.unbox(result[-1]))
    return tuple(result) if len(result) > 1 else result[0]


# NCCL reads the one large tensor as a row of numbers; gloo would cut its first dimension.
_OF_ROWS = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}


def waited(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """``wait_tensor`` and ``wait_tensors``."""
    result = run_unrecorded(func, args, kwargs)
    for tensor in tensors_in(args):
        if type(tensor) is VirtualTensor:
            take_back(tensor)
    return result


# What a rank puts in; where there is none of these, all its tensors.
_INPUTS = ("input_tensors", "input_tensor", "input", "inputs", "input_list")


def _bytes_put_in(call: Call) -> int:
    named = call.named
    values = [named[name] for name in _INPUTS if name in named] or list(named.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(values))


def of_c10d() -> list[str]:
    return [name for name in operators() if name.startswith("c10d::")]


def functional() -> list[str]:
    return [name for name in operators() if not name.startswith("c10d::")]


def waits() -> list[str]:
    return [f"_c10d_functional::{name}" for name in WAITS]


def operators() -> list[str]:
    """The operators of process groups that move tensors."""
    names = torch._C._dispatch_get_all_op_names()
    wanted = {name.partition(".")[0] for name in names if name.startswith(_NAMESPACES)}
    return [name for name in wanted if not name.endswith(_NOT_COUNTED)]
