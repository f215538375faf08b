"""Batches split across copies of the model: variants of DDP, and sharded optimizer state."""

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from strategies.training import (
    STEPS,
    adamw,
    batch,
    device_of,
    network,
    parameters_of,
    sgd,
    trained,
)


def ddp(rank, world_size, device_type, **options):
    device = device_of(device_type, rank)
    model = DDP(network(rank).to(device), **options)
    optimizer = sgd(model)
    return trained(model, optimizer, device, rank, world_size, clip=1.0) + parameters_of(model)


def ddp_with_bucket_views(rank, world_size, device_type):
    return ddp(
        rank,
        world_size,
        device_type,
        gradient_as_bucket_view=True,
        static_graph=True,
        bucket_cap_mb=0.0005,
    )


def ddp_accumulating(rank, world_size, device_type):
    device = device_of(device_type, rank)
    model = DDP(network(rank).to(device))
    optimizer = adamw(model)
    for step in range(STEPS):
        images, labels = (part.to(device) for part in batch(step, rank, world_size))
        with model.no_sync():
            F.cross_entropy(model(images[:2]), labels[:2]).backward()
        F.cross_entropy(model(images[2:]), labels[2:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def zero_redundancy(rank, world_size, device_type):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    device = device_of(device_type, rank)
    model = DDP(network(rank).to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return trained(model, optimizer, device, rank, world_size) + parameters_of(model)


WAYS = [
    ddp,
    ddp_with_bucket_views,
    ddp_accumulating,
    zero_redundancy,
]
