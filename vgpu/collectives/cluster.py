"""``cluster()``: run this process as one rank of a cluster that doesn't exist.

It also predicts a step there, for ``python -m vgpu --cluster`` and ``ddp_iteration``.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from vgpu import backend
from vgpu.collectives import process_groups
from vgpu.hardware import GPUSpec, Link, Network, get_network
from vgpu.memory import gpus
from vgpu.tensor.shapes import shapes_only
from vgpu.time import recording
from vgpu.time.simulate import simulate
from vgpu.time.timeline import Timeline, covered_s
from vgpu.torch_patches import device_module
from vgpu.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts with the same number and model of GPUs; ranks are numbered host by host."""

    hosts: int
    gpus_per_host: int
    gpu: GPUSpec
    network: Network
    rank: int

    @property
    def world_size(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def device(self) -> torch.device:
        """This rank's GPU."""
        return torch.device(gpus.DEVICE_TYPE, self.rank % self.gpus_per_host)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size}: {self.hosts} hosts with {self.gpus_per_host} "
            f"{self.gpu.name.removeprefix('Virtual ')} each, {self.gpu.link.name} inside, "
            f"{self.network.name} between"
        )


@contextmanager
def cluster(
    hosts: int,
    gpus_per_host: int = 8,
    gpu: str | GPUSpec = "H100",
    network: str | Network = "InfiniBand NDR",
    rank: int = 0,
    memory_bytes: int | None = None,
    link: str | Link | None = None,
) -> Iterator[Cluster]:
    """Run the block as rank ``rank`` of ``hosts * gpus_per_host`` ranks.

    In the block, the process has the virtual GPUs of that rank's host instead of those that were
    enabled before; tensors on the old and the new ones can't be mixed. The rank's own GPU is the
    current device, and the default process group contains all ranks. Only shapes can be sent
    (``shapes_only()``), because the other ranks have no values. ``record()`` records this rank's
    virtual time, as if all others in its groups did the same at the same time.

    ``gpu``, ``memory_bytes`` and ``link`` are the same as for ``enable``; ``network`` connects the
    hosts and is a name in ``vgpu.NETWORKS`` or a Network. Raises ValueError for an impossible rank
    or size, and RuntimeError if a process group already exists.
    """
    for name, value in (("hosts", hosts), ("gpus_per_host", gpus_per_host)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < hosts * gpus_per_host:
        raise ValueError(
            f"rank must be from 0 to {hosts * gpus_per_host - 1} for {hosts} hosts with "
            f"{gpus_per_host} GPUs each, got {rank}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "a process group already exists, and a cluster creates its own: call "
            "torch.distributed.destroy_process_group() first, or leave the other cluster's block"
        )
    between = get_network(network)
    with ExitStack() as stack:
        stack.enter_context(gpus.of_another_host())
        stack.enter_context(backend.enable(gpus_per_host, gpu, memory_bytes, link))
        made = Cluster(hosts, gpus_per_host, gpus.by_index(0).spec, between, rank)
        stack.enter_context(mock.patch.dict(os.environ, _environment(made)))
        stack.enter_context(mock.patch.object(process_groups, "ranks_are_absent", True))
        gpus.exchange_index(made.device.index)
        known = {
            "network": between,
            "gpus_per_host": gpus_per_host,
            "slowest_of": made.world_size,
        }
        stack.enter_context(mock.patch.object(recording, "assumed", known))
        # init_process_group makes uncaught errors name the rank, and never undoes that.
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        stack.callback(_leave)
        dist.init_process_group(
            f"{gpus.DEVICE_TYPE}:{process_groups.BACKEND}",  # no CPU tensors, as with NCCL
            store=_store(),
            rank=rank,
            world_size=made.world_size,
        )
        yield made


def _environment(made: Cluster) -> dict[str, str]:
    """Return some variables that torchrun sets, and one that turns off the flight recorder."""
    return {
        "RANK": str(made.rank),
        "WORLD_SIZE": str(made.world_size),
        "LOCAL_RANK": str(made.device.index),
        "LOCAL_WORLD_SIZE": str(made.gpus_per_host),
        "GROUP_RANK": str(made.rank // made.gpus_per_host),
        "TORCH_FR_BUFFER_SIZE": "0",
    }


def _store() -> dist.Store:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()


_DTENSOR = "torch.distributed.tensor"


def _forget_meshes() -> None:
    """Empty DTensor's sharding caches, so that the next cluster doesn't find this one's meshes.

    The caches treat two meshes as equal even if this process has a different rank in each, and thus
    different groups.
    """
    if _DTENSOR not in sys.modules:
        return
    for cache in _caches():
        cache.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()  # C++ has its own


def _caches() -> Iterator[Any]:
    """Yield the caches of functions, methods, and the dispatcher that all DTensors share.

    They can't be found through the garbage collector, which doesn't list the frozen objects that a
    rank's process imported before the fork.
    """
    dispatcher: Any = sys.modules[_DTENSOR].DTensor._op_dispatcher
    yield dispatcher.sharding_propagator.propagate_op_sharding.cache
    for name, module in list(sys.modules.items()):
        if not name.startswith(_DTENSOR):
            continue
        for value in list(vars(module).values()):
            members = vars(value).values() if isinstance(value, type) else (value,)
            for member in members:
                function = getattr(member, "__func__", member)  # a static method's
                if isinstance(function, functools._lru_cache_wrapper):
                    yield function


# python -m vgpu --cluster


@contextmanager
def predict_second_step(**options: Any) -> Iterator[None]:
    """Run the program in the block as rank 0 of a cluster, with tensors that are shapes.

    Recording starts after an optimizer's first step, which creates its state. After the second
    step, the result is printed, and SystemExit is raised. ``options`` are those of ``cluster``. If
    the program reads a tensor's value before that, NoValueError is raised, because shapes have no
    values.
    """
    timelines: list[Timeline] = []
    with ExitStack() as block:
        made = block.enter_context(cluster(**options))
        # The cluster's process group already exists, so a program that creates one gets that one.
        block.enter_context(mock.patch.object(dist, "init_process_group", lambda *_, **__: None))
        block.enter_context(shapes_only())
        recorded = block.enter_context(ExitStack())

        def after_step(*_: Any) -> None:
            if not timelines:
                device_module.reset_peak_memory_stats()
                timelines.append(recorded.enter_context(recording.record()))
                return
            recorded.close()
            print(_report(made, timelines[0]), flush=True)
            raise SystemExit

        block.callback(register_optimizer_step_post_hook(after_step).remove)
        yield
        taken = len(timelines)
        raise SystemExit(
            f"python -m vgpu --cluster: this records the second optimizer step, but the program "
            f"took only {taken}: make it take at least two"
        )


def _report(made: Cluster, timeline: Timeline) -> str:
    events = timeline.of(made.device)
    kernels = [event for event in events if event.kind == "kernel"]
    collectives = [event for event in events if event.kind == "collective"]
    step_s, computing_s = timeline.makespan_s, covered_s(kernels)
    busy_s = covered_s(kernels + collectives)
    parts = {
        "computing": computing_s,
        "exposed collectives": busy_s - computing_s,
        "neither": step_s - busy_s,
    }
    lines = [str(made), f"a step takes {format_seconds(step_s)} of virtual time"]
    lines += [f"  {time_s / step_s:6.1%} {what}" for what, time_s in parts.items()]
    peak, of = device_module.max_memory_allocated(), made.gpu.memory_bytes
    lines.append(f"peak memory: {format_bytes(peak)} of {format_bytes(of)} allocated")
    return "\n".join(lines)


# One training iteration of DataParallel and of DistributedDataParallel, in virtual time
#
# Both run PyTorch's own code, on shapes. DataParallel is one process whose threads compete for the
# GIL. Each launch in the forward pass holds it for part of the time (``CostModel.locked_share``),
# and every iteration broadcasts the parameters from GPU 0 and reduces the gradients there. In DDP,
# one rank of a virtual cluster, with its share of the batch, represents all ranks; each rank has
# its own process, and all-reduces a bucket of gradients as soon as the backward pass has filled it.
#
# Not modeled: for DDP, differences between ranks; for DataParallel, the copies of parameters into
# the broadcast's buffers.


def data_parallel_iteration(
    make_model: Callable[[], nn.Module],
    inputs_size: tuple[int, ...],
    targets_size: tuple[int, ...],
    count: int,
    **changes: Any,
) -> Timeline:
    """Predict an iteration of nn.DataParallel on ``count`` of the enabled GPUs.

    ``inputs_size`` and ``targets_size`` are for the full batch; ``changes`` are fields of
    CostModel, as in ``record()``.
    """
    gpu = gpus.by_index(0).device
    with shapes_only():
        model = nn.DataParallel(make_model().to(gpu), list(range(count)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.empty(inputs_size, device=gpu)
        targets = torch.empty(targets_size, device=gpu)
        # So that gradients exist, as in later steps.
        nn.functional.mse_loss(model(inputs), targets).backward()
        with recording.record(**changes) as timeline:
            optimizer.zero_grad(set_to_none=False)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    timeline.devices = timeline.devices[:count]
    timeline.programs[0].gpus = count
    return timeline


def ddp_iteration(
    make_model: Callable[[], nn.Module],
    inputs_size: tuple[int, ...],
    targets_size: tuple[int, ...],
    world_size: int,
    **changes: Any,
) -> Timeline:
    """Predict an iteration of DDP on ``world_size`` GPUs like the enabled ones, one process each.

    ``inputs_size`` and ``targets_size`` are for the full batch, whose first dimension must be
    divisible by ``world_size``.
    """
    if inputs_size[0] % world_size:
        raise ValueError(f"{world_size} ranks can't share {inputs_size[0]} samples evenly")
    share = inputs_size[0] // world_size
    with cluster(1, world_size, gpus.by_index(0).spec) as made, shapes_only():
        model = DistributedDataParallel(make_model().to(made.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.empty((share, *inputs_size[1:]), device=made.device)
        targets = torch.empty((share, *targets_size[1:]), device=made.device)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

        # DDP starts with provisional buckets, and creates the final ones in its second forward
        # pass.
        step()
        step()
        with recording.record(**changes) as timeline:
            step()
    (program,) = timeline.programs
    return simulate([dataclasses.replace(program, rank=rank) for rank in range(world_size)])
