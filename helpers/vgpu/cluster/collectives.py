"""Collectives of tensors that are only shapes.

Nothing is sent: what comes out has the size that the collective says. In a recording it takes the
time of its group, on a stream of the group's own, as NCCL does it: the group's stream waits for the
current one, and whoever waits for the collective makes the current stream wait for it.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork
from torch.distributed.distributed_c10d import _resolve_process_group

from helpers.vgpu.device.gpus import VirtualGPU
from helpers.vgpu.dispatch.operators import named_arguments
from helpers.vgpu.distributed import ddp, groups
from helpers.vgpu.shapes import operations
from helpers.vgpu.shapes.operations import ShapeCall, ShapeHandler
from helpers.vgpu.timing import recording
from helpers.vgpu.timing.lanes import Done, in_backward
from helpers.vgpu.timing.recording import Recording
from helpers.vgpu.timing.streams import Stream
from helpers.vgpu.timing.traits import tensors_in

Tensors = list[torch.Tensor]


class _Call:
    """One collective: its group, and what this rank gives and receives."""

    def __init__(self, call: ShapeCall, made: Tensors) -> None:
        """made: the results that are new tensors."""
        self.name = groups.plain_name(call.func)
        named = named_arguments(call.func, call.args, call.kwargs)
        self.group = _group_of(named)
        in_place = call.func._schema.name.endswith("_")
        self.given, self.received = _given_and_received(self.name, named, in_place)
        self.made = made
        # Among the group's ranks; for a message, the one at its other end.
        self.peer: int | None = None
        if self.name in ("send", "recv"):
            self.peer = named.get("dst", named.get("src"))

    def check_sizes(self) -> None:
        """ValueError for what the collective cannot do; what NCCL would read beyond the end."""
        given = sum(tensor.numel() for tensor in self.given)
        received = sum(tensor.numel() for tensor in [*self.received, *self.made])
        count = self.group.size()
        wanted = {
            "all_gather": (given * count, received),
            "reduce_scatter": (given, received * count),
        }
        needs, has = wanted.get(self.name, (0, 0))
        if needs != has:
            raise ValueError(
                f"{self.name} among {count} ranks gets {given} elements and has room for {received}: "
                f"one of them must be {count} times the other"
            )

    @property
    def size_bytes(self) -> int:
        """As ``timing.collectives`` counts: of the whole tensor."""
        given, received = _bytes(self.given), _bytes([*self.received, *self.made])
        if self.name in ("all_gather", "recv"):
            return received
        if self.name == "gather":
            return given * self.group.size()
        if self.name == "scatter":
            return received * self.group.size()
        return given

    @property
    def ranks(self) -> list[int]:
        """The ranks of the whole cluster that take part."""
        ranks = dist.get_process_group_ranks(self.group)
        return ranks if self.peer is None else [dist.get_rank(), ranks[self.peer]]

    def run(self, gpu: VirtualGPU) -> Done | None:
        """Take part; returns the end in a recording."""
        self.check_sizes()
        groups.tally.add(self.name, _bytes(self.given))
        now = recording.under_way
        if now is None:
            return None
        stream = _stream_of(now, gpu, self.group.group_name, self.peer, self.name)
        return now.joined(self.name, gpu, self, stream)


class _Wait:
    """What waiting for a collective does: the current stream waits, or the host for a barrier."""

    def __init__(self, done: Done | None, gpu: VirtualGPU, by_host: bool = False) -> None:
        self._done = done
        self._gpu = gpu
        self._by_host = by_host
        self._recording = recording.under_way

    def __call__(self) -> None:
        now = recording.under_way
        if self._done is not None and now is not None and now is self._recording:
            now.wait_for(self._done, self._gpu, self._by_host)

    def within(self, timeout: timedelta) -> bool:
        """``Work.wait``; nothing here takes real time."""
        self()
        return True


class _OfDDP(dist.Work):
    """What DDP gets for a bucket: in C++, at the end of the backward pass, it waits for a future."""

    def __init__(self, tensors: Tensors, waiting: _Wait) -> None:
        super().__init__()
        self._tensors = tensors
        self._waiting: _Wait | None = waiting
        # Until then it keeps itself: C++ calls Python only while the Python object lives.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._waiting is not None:
            self._waiting()
            self._waiting = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._end()
        return True

    def get_future(self) -> Any:
        # A future of C++, whose value C++ can read; torch.futures.Future keeps Python's objects.
        return torch._C.fork(lambda: self._tensors)


# The operators


def _of_c10d(call: ShapeCall) -> Any:
    """An operator of ``torch.ops.c10d`` writes to its arguments and hands out what to wait for."""
    gpu = _gpu_of(call)
    one = _Call(call, [])
    done = one.run(gpu)
    waiting = _Wait(done, gpu, by_host=one.name == "barrier")
    if in_backward() and one.group.group_name in ddp.group_names:
        work: dist.Work = _OfDDP(one.received, waiting)
    else:
        work = PythonCallbackWork(waiting.within)
    boxed = dist.Work.boxed(work)
    return boxed if len(call.func._schema.returns) == 1 else (call.args[0], boxed)


def _functional(call: ShapeCall) -> Any:
    """An operator of ``torch.ops._c10d_functional`` hands out tensors that someone waits for."""
    results = operations.results_of(call)
    made = [made for made in tensors_in(results) if not any(made is x for x in call.inputs)]
    _Call(call, made).run(_gpu_of(call))
    return results


def _wrap_async(call: ShapeCall) -> Any:
    """A result that waits for its collective when it is first used."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(call.args[0])


def _wait_tensor(call: ShapeCall) -> Any:
    now = recording.under_way
    if now is not None:
        for tensor in call.inputs:
            now.wait_for_last_write(tensor)
    return call.args[0]


def _of_fsdp(call: ShapeCall) -> Any:
    """An operator of FSDP's: what its implementation for GPUs does, in place of its meta kernel."""
    with call.mode:
        return call.func._op_dk(torch._C.DispatchKey.PrivateUse1, *call.args, **call.kwargs)


_handlers: dict[str, ShapeHandler] = {
    "_c10d_functional::_wrap_tensor_autograd": _wrap_async,
    "_c10d_functional::wait_tensor": _wait_tensor,
    "_c10d_functional::wait_tensors": _wait_tensor,
    "fsdp::all_gather_copy_in": _of_fsdp,
    "fsdp::chunk_cat": _of_fsdp,
    "fsdp::split_with_sizes_copy": _of_fsdp,
}
for _name in groups.operators():
    _handlers[_name] = _of_c10d if _name.startswith("c10d::") else _functional
operations.use_handlers(_handlers)


# What the arguments say


def _gpu_of(call: ShapeCall) -> VirtualGPU:
    if isinstance(call.gpu, VirtualGPU):
        return call.gpu
    raise RuntimeError(
        f"{groups.plain_name(call.func)} of a tensor on the host, but the groups of a virtual "
        "cluster connect its GPUs, as NCCL's do: move the tensor to the rank's GPU"
    )


_GIVEN = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
_RECEIVED = ("output_tensors", "output_tensor", "output_lists", "outputs", "output", "out")


def _given_and_received(
    name: str, named: dict[str, Any], in_place: bool
) -> tuple[Tensors, Tensors]:
    given = [tensor for key in _GIVEN if key in named for tensor in tensors_in(named[key])]
    received = [tensor for key in _RECEIVED if key in named for tensor in tensors_in(named[key])]
    if name == "recv":
        return [], given
    if in_place and name in ("all_reduce", "broadcast", "reduce"):
        return given, given
    return given, received


def _group_of(named: dict[str, Any]) -> dist.ProcessGroup:
    group: Any = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _stream_of(now: Recording, gpu: VirtualGPU, group: str, peer: int | None, name: str) -> int:
    """The number of the group's own stream; messages to and from each peer have one each."""
    key = (gpu.index, group) if peer is None else (gpu.index, group, peer, name)
    return now.stream_numbers.setdefault(key, Stream(gpu.device).stream_id)
