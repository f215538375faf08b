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
from vgpu.tensor.observer import virtual_among
from vgpu.tensor.operator_info import Block, shape_handler
from vgpu.tensor.operators import Args, Kwargs, Operator, tensors_in
from vgpu.tensor.tensor import run_unrecorded
from vgpu.time import recording
from vgpu.time.lanes import Done
from vgpu.time.recording import gpu_of


@shape_handler(*groups.of_c10d())
def _of_c10d(func: Operator, args: Args, kwargs: Kwargs, block: Block) -> Any:
    """An operator of ``torch.ops.c10d`` writes to its arguments and hands out what to wait for."""
    gpu = _gpu_of(func, args)
    one = Call(func, args, kwargs)
    waiting = Waiting(_send(one, gpu), gpu, by_host=one.name == "barrier")
    work: dist.Work = PythonCallbackWork(waiting.within)
    if one.is_for_ddp:
        work = OfDDP(one.received, waiting)
    boxed = dist.Work.boxed(work)
    return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


@shape_handler(*groups.functional())
def _functional(func: Operator, args: Args, kwargs: Kwargs, block: Block) -> Any:
    """An operator of ``torch.ops._c10d_functional`` hands out tensors that someone waits for."""
    results, inputs = run_unrecorded(func, args, kwargs, block), list(tensors_in(args))
    made = [made for made in tensors_in(results) if not any(made is x for x in inputs)]
    _send(Call(func, args, kwargs, made), _gpu_of(func, args))
    return results


def _send(call: Call, gpu: VirtualGPU) -> Done | None:
    checks.check(call)
    groups.tally.add(call.name, call.given_bytes)
    return recorded.record(call, gpu)


@shape_handler("_c10d_functional::_wrap_tensor_autograd")
def _wrap_async(func: Operator, args: Args, kwargs: Kwargs, block: Block) -> Any:
    """A result that waits for its collective when it is first used."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


@shape_handler(*groups.waits())
def _wait_tensor(func: Operator, args: Args, kwargs: Kwargs, block: Block) -> Any:
    if recording.under_way is not None:
        for tensor in virtual_among(args):
            recording.under_way.wait_for_last_write(tensor)
    return args[0]


@shape_handler("fsdp::all_gather_copy_in", "fsdp::chunk_cat", "fsdp::split_with_sizes_copy")
def _of_fsdp(func: Operator, args: Args, kwargs: Kwargs, block: Block) -> Any:
    """An operator of FSDP's: what its implementation for GPUs does, in place of its meta kernel."""
    with block:
        return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)


def _gpu_of(func: Operator, args: Args) -> VirtualGPU:
    found = (gpu_of(tensor) for tensor in tensors_in(args))
    gpu = next((gpu for gpu in found if gpu is not None), None)
    if gpu is not None:
        return gpu
    raise RuntimeError(
        f"{plain_name(func)} of a tensor on the host, but the groups of a virtual "
        "cluster connect its GPUs, as NCCL's do: move the tensor to the rank's GPU"
    )
