"""Collectives of tensors that are only shapes.

Nothing is sent: what comes out has the size that the collective says. What they do in a recording
stands in distributed/recorded.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from vgpu.collectives import checks, groups, recorded
from vgpu.collectives.call import Call, plain_name
from vgpu.collectives.recorded import OfDDP, Waiting
from vgpu.memory.gpus import VirtualGPU
from vgpu.tensor.shapes import operations
from vgpu.tensor.shapes.operations import ShapeCall
from vgpu.time import recording
from vgpu.time.happens_before import Enqueued
from vgpu.time.traits import tensors_in


def _of_c10d(call: ShapeCall) -> Any:
    """An operator of ``torch.ops.c10d`` writes to its arguments and hands out what to wait for."""
    gpu = _gpu_of(call)
    one = Call(call.func, call.args, call.kwargs)
    waiting = Waiting(_send(one, gpu), gpu, by_host=one.name == "barrier")
    work: dist.Work = PythonCallbackWork(waiting.within)
    if one.is_for_ddp:
        work = OfDDP(one.received, waiting)
    boxed = dist.Work.boxed(work)
    return boxed if len(call.func._schema.returns) == 1 else (call.args[0], boxed)


def _functional(call: ShapeCall) -> Any:
    """An operator of ``torch.ops._c10d_functional`` hands out tensors that someone waits for."""
    results = operations.results_of(call)
    made = [made for made in tensors_in(results) if not any(made is x for x in call.inputs)]
    _send(Call(call.func, call.args, call.kwargs, made), _gpu_of(call))
    return results


def _send(call: Call, gpu: VirtualGPU) -> Enqueued | None:
    checks.check(call)
    groups.tally.add(call.name, call.given_bytes)
    return recorded.record(call, gpu)


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


operations.use_handlers(
    recorded.handlers(_of_c10d, _functional, _wrap_async, _wait_tensor, _of_fsdp)
)


def _gpu_of(call: ShapeCall) -> VirtualGPU:
    if isinstance(call.gpu, VirtualGPU):
        return call.gpu
    raise RuntimeError(
        f"{plain_name(call.func)} of a tensor on the host, but the groups of a virtual "
        "cluster connect its GPUs, as NCCL's do: move the tensor to the rank's GPU"
    )
