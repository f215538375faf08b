"""Layers split into stages, with PyTorch's schedules."""

import torch
from torch import nn
from torch.nn import functional as F

from strategies.training import device_of, full


def _pipeline(rank, world_size, device_type, kind, stages_per_rank=1):
    from torch.distributed import pipelining

    device = device_of(device_type, rank)
    torch.manual_seed(0)
    count = stages_per_rank * world_size
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]
    stages = [
        pipelining.PipelineStage(blocks[i].to(device), i, count, device)
        for i in range(rank, count, world_size)
    ]
    schedule_class = getattr(pipelining, kind)
    several = stages_per_rank > 1
    schedule = schedule_class(stages if several else stages[0], 4, loss_fn=F.mse_loss)
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 8).to(device), torch.randn(8, 8).to(device)
    losses = []
    first = [inputs] if rank == 0 else []
    last = rank == (count - 1) % world_size
    schedule.step(*first, **({"target": targets, "losses": losses} if last else {}))
    gradients = [
        full(parameter.grad)
        for i in range(rank, count, world_size)
        for parameter in blocks[i].parameters()
    ]
    return [full(loss) for loss in losses] + gradients


def gpipe(rank, world_size, device_type):
    return _pipeline(rank, world_size, device_type, "ScheduleGPipe")


def interleaved(rank, world_size, device_type):
    return _pipeline(rank, world_size, device_type, "ScheduleInterleaved1F1B", 2)


def zero_bubble(rank, world_size, device_type):
    return _pipeline(rank, world_size, device_type, "ScheduleInterleavedZeroBubble", 2)


WAYS = [
    gpipe,
    interleaved,
    zero_bubble,
]
