"""One training iteration of DataParallel and of DistributedDataParallel, in virtual time.

Both run PyTorch's own code, on shapes. DataParallel is one process whose threads compete for the
GIL. Each launch in the forward pass holds it for part of the time (``CostModel.locked_share``), and
every iteration broadcasts the parameters from GPU 0 and reduces the gradients there. In DDP, one
rank of a virtual cluster, with its share of the batch, represents all ranks; each rank has its own
process, and all-reduces a bucket of gradients as soon as the backward pass has filled it.

Not modeled: for DDP, differences between ranks; for DataParallel, the copies of parameters into the
broadcast's buffers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vgpu.collectives.cluster import cluster
from vgpu.memory import gpus
from vgpu.tensor.shapes import shapes_only
from vgpu.time.recording import record
from vgpu.time.simulate import simulate
from vgpu.time.timeline import Timeline


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
        with record(**changes) as timeline:
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
        with record(**changes) as timeline:
            step()
    (program,) = timeline.programs
    return simulate([dataclasses.replace(program, rank=rank) for rank in range(world_size)])
