"""Runs collectives' operators on virtual tensors.

Each call is checked and counted. gloo transfers the values of the CPU tensors inside them; for
shapes, nothing is sent. In a recording, the collective takes virtual time on its group's own
stream, as with NCCL: the group's stream waits for the current one, and waiting for the collective
makes the current stream wait for the group's.
"""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.distributed import distributed_c10d

from vgpu.collectives import process_groups, table
from vgpu.collectives.table import Call
from vgpu.collectives.work import BorrowedBuffers, Ending, OwnMessage, Waiting, waited_for, work_of
from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.methods import virtual_among
from vgpu.tensor.operators import (
    Args,
    Kwargs,
    Operator,
    ShapesMode,
    handler,
    shape_handler,
    tensors_in,
)
from vgpu.tensor.tensor import VirtualTensor, run_unrecorded
from vgpu.time import recording
from vgpu.time.recording import Recording, gpu_of
from vgpu.torch_patches.device_module import Stream
from vgpu.torch_patches.undo import Changes


class Tally:
    """Counts this process's collectives on virtual tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()

    def add(self, call: Call) -> None:
        with self._lock:
            self.calls[call.name] += 1
            self.bytes[call.name] += call.input_bytes


_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors")
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
_FSDP = ("fsdp::all_gather_copy_in", "fsdp::chunk_cat", "fsdp::split_with_sizes_copy")

tally = Tally()
"""By name, such as "all_reduce": the number of calls, and the bytes of this rank's inputs."""


# Tensors with values


@handler(*table.NAMES, records_itself=True)
def _run(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run any collective on tensors with values.

    A c10d operator writes to its arguments and returns the work to wait for; a functional one
    returns tensors to wait for.
    """
    call = table.read_call(func, args, kwargs)
    if process_groups.ranks_are_absent:
        raise RuntimeError(
            f"{call.name} got a tensor with values, but the other ranks of this virtual cluster "
            "don't exist and so have no values: create the tensor, or move it to its GPU, in a "
            "vgpu.shapes_only() block"
        )
    table.check(call)
    gpu = next(tensor._gpu for tensor in tensors_in(args) if type(tensor) is VirtualTensor)
    process_groups.claim_gpu(call.group, gpu)
    process_groups.compare_dtypes(call)
    tally.add(call)
    tensors = list(call.inputs or call.outputs)
    with _RecordFunctionFast(f"{process_groups.BACKEND}:{call.name}", tensors):
        if call.is_functional:
            result = _carry_functional(call, func, args, kwargs)
        elif call.operator == "c10d::allgather_" and len({part.shape for part in call.outputs}) > 1:
            written, ending = _gather_unequal_parts(call, args)
        elif call.operator == "c10d::alltoall_":
            written, ending = _exchange_lists(call, args)
        elif call.peer == call.group.rank():
            written, ending = (), _message_to_oneself(call)
        else:
            written, ending = _carry(call, func, args, kwargs)
    if call.is_functional:
        _record_functional(call, list(tensors_in(args)), result, gpu)
        return result
    if recording.under_way is not None:
        ending.waiting = _record(call, gpu)
    boxed = dist.Work.boxed(work_of(call, ending))
    return (*written, boxed) if written else boxed


# The arguments that a c10d operator wrote to and returns, and its collective's ``Ending``.
_Result = tuple[tuple[Any, ...], Ending]


def _gather_unequal_parts(call: Call, args: Args) -> _Result:
    """Gather unequal parts by broadcasting each, as NCCL does; block until that has finished."""
    outputs, (own,), group, *_ = args
    (parts,) = outputs
    # With NCCL, this copy is part of the collective's kernel, not a separate one.
    run_unrecorded(torch.ops.aten.copy_.default, (parts[call.group.rank()].detach(), own), {})
    broadcast = torch.ops.c10d.broadcast_.default
    for root, part in enumerate(parts):
        given = ([part], group, root, 0, False)
        _carry(table.read_call(broadcast, given, {}), broadcast, given, {})
    return (outputs,), Ending(call)


def _exchange_lists(call: Call, args: Args) -> _Result:
    """Run an all-to-all of lists, whose parts may differ in size; block until it has finished.

    gloo's own all-to-all of lists, available since torch 2.15, is for equal parts only. NCCL makes
    no copies, so the copies here are made on the CPU tensors inside.
    """
    given = torch.cat([_row_inside(part) for part in call.inputs])
    sizes = [part.numel() for part in call.outputs]
    received = given.new_empty(sum(sizes))
    splits = sizes, [part.numel() for part in call.inputs]
    dist.Work.unbox(torch.ops.c10d.alltoall_base_(received, given, args[2], *splits)).wait()
    for part, values in zip(call.outputs, received.split(sizes), strict=True):
        _row_inside(part).copy_(values)
    return (args[0],), Ending(call)


def _row_inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a virtual tensor's values as NCCL reads them: in memory order."""
    assert isinstance(tensor, VirtualTensor)
    return tensor._inner.detach().as_strided((tensor.numel(),), (1,))


_own_messages: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[Call]]" = (
    weakref.WeakKeyDictionary()
)
"""By group: this rank's sends to itself that have no receive yet, and receives with no send."""


def _message_to_oneself(call: Call) -> Ending:
    """Handle a message from this rank to itself, which gloo can't send.

    NCCL copies such a message once a group of calls contains both ends.
    """
    pending = _own_messages.setdefault(call.group, [])
    other = next((each for each in pending if each.name != call.name), None)
    if other is None:
        pending.append(call)
    else:
        pending.remove(other)
        (given,), (received,) = call.inputs or other.inputs, call.outputs or other.outputs
        if given.dtype != received.dtype or given.numel() != received.numel():
            raise ValueError(
                f"rank {call.peer} of the group sends itself {given.numel()} elements of "
                f"{given.dtype}, but receives {received.numel()} of {received.dtype}"
            )
        _row_inside(received).copy_(_row_inside(given))
    return Ending(call, OwnMessage(call, pending))


def _carry_functional(call: Call, func: Operator, args: Args, kwargs: Kwargs) -> Any:
    buffers = BorrowedBuffers(call.name)
    given = {name: buffers.lend(value) for name, value in kwargs.items()}
    result = buffers.result(run_unrecorded(func, buffers.lend(args), given))
    buffers.return_when_waited_for(result)
    return result


def _carry(call: Call, func: Operator, args: Args, kwargs: Kwargs) -> _Result:
    """Run the collective with gloo."""
    buffers = BorrowedBuffers(call.name)
    given = args
    if call.operator in _READ_AS_ROWS:
        given = (*(tensor.as_strided((tensor.numel(),), (1,)) for tensor in args[:2]), *args[2:])
    result = buffers.result(run_unrecorded(func, buffers.lend(given), kwargs))
    result = list(result) if isinstance(result, list | tuple) else [result]
    if call.operator in _READ_AS_ROWS:
        result[0] = args[0]
    if call.arguments.get("async_op") is False:
        buffers.wait_for_work(result)
        return tuple(result), Ending(call)
    gloos = dist.Work.unbox(result.pop())
    return tuple(result), Ending(call, gloos, buffers)


# NCCL reads the large tensor as one block of memory; gloo would split its first dimension.
_READ_AS_ROWS = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}


@handler(*_WAITS, records_itself=True)
def _run_wait(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run ``wait_tensor`` or ``wait_tensors``."""
    tensors = [tensor for tensor in tensors_in(args) if isinstance(tensor, VirtualTensor)]
    if recording.under_way is not None:
        for tensor in tensors:
            recording.under_way.wait_for_last_write(tensor)
    run_unrecorded(func, args, kwargs)
    for tensor in tensors:
        waited_for(tensor)
    return args[0]


@shape_handler(_WRAP)
@handler(_WRAP, records_itself=True)
def _run_wrap(
    func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode | None = None
) -> torch.Tensor:
    """Return a result that waits for its collective when it's first used."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


@handler(*_FSDP, records_itself=True)
def _run_fsdp(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run an FSDP operator's GPU implementation, not the CPU's."""
    return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)


def _refuse(func: Operator, *args: Any) -> NoReturn:
    """Reject a c10d operator that isn't in the table; otherwise, it would run as a kernel."""
    raise NotImplementedError(
        f"{func._schema.name} is not supported on virtual GPUs: call it with tensors on the CPU, "
        "or use one of "
        f"{', '.join(name for name, each in table.COLLECTIVES.items() if each.operators)}"
    )


_NAMES = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
_WITHOUT_A_ROW = {name for name in _NAMES if name.startswith(("c10d::", "_c10d_functional::"))}
_WITHOUT_A_ROW -= {*table.NAMES, *_WAITS, _WRAP, "c10d::check_for_nan"}
handler(*_WITHOUT_A_ROW)(_refuse)
shape_handler(*_WITHOUT_A_ROW)(_refuse)


# Shapes


@shape_handler(*table.NAMES)
def _run_shapes(func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode) -> Any:
    """Run any collective on shapes; its results have the sizes that torch's meta kernel returns."""
    call = table.read_call(func, args, kwargs)
    gpu = next(filter(None, map(gpu_of, tensors_in(args))), None)
    if gpu is None:
        raise RuntimeError(
            f"{call.name} got a tensor on the host, but a virtual cluster's groups connect only "
            "GPUs, as NCCL's do: move the tensor to the rank's GPU"
        )
    table.check(call)
    tally.add(call)
    if call.is_functional:
        results = run_unrecorded(func, args, kwargs, mode)
        _record_functional(call, virtual_among(args), results, gpu)
        return results
    ending = Ending(call)
    ending.waiting = _record(call, gpu)
    boxed = dist.Work.boxed(work_of(call, ending))
    return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


@shape_handler(*_WAITS)
def _run_wait_of_shapes(func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode) -> Any:
    if recording.under_way is not None:
        for tensor in virtual_among(args):
            recording.under_way.wait_for_last_write(tensor)
    return args[0]


@shape_handler(*_FSDP)
def _run_fsdp_of_shapes(func: Operator, args: Args, kwargs: Kwargs, mode: ShapesMode) -> Any:
    with mode:
        return _run_fsdp(func, args, kwargs)


# In a recording


def _record(call: Call, gpu: VirtualGPU) -> Waiting:
    """Record the collective, if a recording is active."""
    now = recording.under_way
    done = None
    if now is not None:
        done = now.group_collective(call, gpu, _stream_number(now, gpu, call))
    return Waiting(done, gpu, by_host=call.name == "barrier")


def _record_functional(
    call: Call, inputs: Sequence[torch.Tensor], result: Any, gpu: VirtualGPU
) -> None:
    call.made = [made for made in tensors_in(result) if not any(made is x for x in inputs)]
    waiting = _record(call, gpu)
    if call.operator.startswith("_dtensor::"):  # its GPU kernel waits immediately
        waiting()


def _stream_number(now: Recording, gpu: VirtualGPU, call: Call) -> int:
    """Return the group's stream number; messages to and from each peer have their own."""
    key: tuple[Any, ...] = (gpu.index, call.group_name)
    if call.peer is not None:
        key = (*key, call.peer, call.name)
    return now.stream_numbers.setdefault(key, Stream(gpu.device).stream_id)


def install(changes: Changes) -> None:
    barrier = _with_virtual_time(dist.barrier)
    changes.set(dist, "barrier", barrier)
    changes.set(distributed_c10d, "barrier", barrier)


def _with_virtual_time(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist.barrier``, for which gloo uses a CPU tensor, never a virtual one."""

    @functools.wraps(plain)
    def barrier(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Any:
        of: Any = group or dist.group.WORLD
        virtual = isinstance(of, dist.ProcessGroup) and gpus.DEVICE_TYPE in {
            device.type for device in of._device_types
        }
        if process_groups.ranks_are_absent or not virtual:
            return plain(group, async_op, *args, **kwargs)
        with _RecordFunctionFast(f"{process_groups.BACKEND}:barrier"):
            work = plain(group, async_op, *args, **kwargs)
        call = table.call_of("c10d::barrier", {}, of)
        waiting = _record(call, gpus.by_index(gpus.current_index()))
        if not async_op:
            waiting()
        return work

    return barrier
