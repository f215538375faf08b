"""Collectives of process groups in a recording of virtual time.

A collective takes the time of its group, on a stream of the group's own, as NCCL does it: the
group's stream waits for the current one, and whoever waits for the collective makes the current
stream wait for it. So it is whether tensors have values, which gloo carries meanwhile (here), or
are only shapes (cluster/collectives.py).
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork
from torch.distributed import distributed_c10d

from vgpu.changes import Changes
from vgpu.collectives import groups
from vgpu.collectives.call import Call, Tensors
from vgpu.memory import gpus
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.operator_info import handler
from vgpu.tensor.operators import Args, Kwargs, Operator, tensors_in
from vgpu.tensor.tensor import VirtualTensor, run_unrecorded
from vgpu.time import recording
from vgpu.time.lanes import Done
from vgpu.time.recording import Recording, gpu_of
from vgpu.time.streams import Stream


def record(call: Call, gpu: VirtualGPU) -> Done | None:
    """Take part in the recording that is under way, if any; returns the end there."""
    now = recording.under_way
    if now is None:
        return None
    return now.joined(call.name, gpu, call, _stream_of(now, gpu, call.group_name, call))


class Waiting:
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


class OfDDP(dist.Work):
    """What DDP gets for a bucket: in C++, at the end of the backward pass, it waits for a future."""

    def __init__(self, tensors: Tensors, waiting: Waiting, of_gloo: dist.Work | None = None):
        """of_gloo: what carries the values, if there are any."""
        super().__init__()
        self._tensors = tensors
        self._waiting: Waiting | None = waiting
        self._of_gloo = of_gloo
        # Until then it keeps itself: C++ calls Python only while the Python object lives.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._waiting is not None:
            self._waiting()
            self._waiting = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._end()
        return self._of_gloo is None or self._of_gloo.wait()

    def get_future(self) -> Any:
        # A future of C++, whose value C++ can read; torch.futures.Future keeps Python's objects.
        if self._of_gloo is not None:
            self._of_gloo.wait()
        return torch._C.fork(lambda: self._tensors)


# Tensors with values


class _Work(PythonCallbackWork):
    """What gloo works on, and in virtual time what waiting for it does."""

    def __init__(self, work: dist.Work, waiting: Waiting) -> None:
        def wait(timeout: timedelta) -> bool:
            finished = work.wait(timeout) if timeout.total_seconds() > 0 else work.wait()
            waiting()
            return finished

        super().__init__(wait)
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def get_future(self) -> Any:
        return self._work.get_future()


@handler(*groups.of_c10d(), records_itself=True)
def _of_c10d(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """An operator of ``torch.ops.c10d`` writes to its arguments and hands out what to wait for."""
    result, now = groups.counted(func, args, kwargs), recording.under_way
    if now is None:
        return result
    gpu = _gpu_among(args)
    call = Call(func, args, kwargs)
    waiting = Waiting(record(call, gpu), gpu, by_host=call.name == "barrier")
    *others, boxed = result if isinstance(result, list | tuple) else [result]
    of_gloo = dist.Work.unbox(boxed)
    if call.is_for_ddp:
        work: dist.Work = OfDDP(call.received, waiting, of_gloo)
    else:
        work = _Work(of_gloo, waiting)
        now.keep(work)
    boxed = dist.Work.boxed(work)
    return (*others, boxed) if others else boxed


@handler(*groups.functional(), records_itself=True)
def _functional(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """An operator of ``torch.ops._c10d_functional`` hands out tensors that someone waits for."""
    results = groups.counted(func, args, kwargs)
    if recording.under_way is None:
        return results
    inputs = list(tensors_in(args))
    made = [made for made in tensors_in(results) if not any(made is x for x in inputs)]
    record(Call(func, args, kwargs, made), _gpu_among(args))
    return results


@handler(*groups.waits(), records_itself=True)
def _wait_tensor(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    if recording.under_way is not None:
        for tensor in tensors_in(args):
            if isinstance(tensor, VirtualTensor):
                recording.under_way.wait_for_last_write(tensor)
    return groups.waited(func, args, kwargs)


@handler(
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::split_with_sizes_copy",
    records_itself=True,
)
def _of_fsdp(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """An operator of FSDP's: in a recording, what its implementation for GPUs does."""
    if recording.under_way is None:
        return run_unrecorded(func, args, kwargs)
    return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)


class _Barrier:
    """A rank's part of a barrier, which moves one byte."""

    size_bytes = 1

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.given: Tensors = []
        self.received: Tensors = []
        self.made: Tensors = []
        self.group_name = str(group.group_name)
        self.ranks = dist.get_process_group_ranks(group)


def _with_virtual_time(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``dist.barrier``, for which gloo takes a CPU tensor, so that no virtual GPU sees it."""

    @functools.wraps(plain)
    def barrier(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Any:
        work = plain(group, async_op, *args, **kwargs)
        now, of = recording.under_way, group or dist.group.WORLD
        if now is None or groups.ranks_are_absent or not isinstance(of, dist.ProcessGroup):
            return work
        if gpus.DEVICE_TYPE in {device.type for device in of._device_types}:
            gpu, part = gpus.by_index(gpus.current_index()), _Barrier(of)
            stream = _stream_of(now, gpu, part.group_name, None)
            done = now.joined("barrier", gpu, part, stream)
            if not async_op:
                now.wait_for(done, gpu, by_host=True)
        return work

    return barrier


def install(changes: Changes) -> None:
    if dist.is_available():
        barrier = _with_virtual_time(dist.barrier)
        changes.set(dist, "barrier", barrier)
        changes.set(distributed_c10d, "barrier", barrier)


def _gpu_among(args: Args) -> VirtualGPU:
    found = (gpu_of(tensor) for tensor in tensors_in(list(args)))
    return next(gpu for gpu in found if gpu is not None)


def _stream_of(now: Recording, gpu: VirtualGPU, group: str, message: Call | None) -> int:
    """The number of the group's own stream; messages to and from each peer have one each."""
    key: tuple[Any, ...] = (gpu.index, group)
    if message is not None and message.peer is not None:
        key = (*key, message.peer, message.name)
    return now.stream_numbers.setdefault(key, Stream(gpu.device).stream_id)
