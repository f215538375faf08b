"""Batches split over copies of the model: DDP in its ways, sharded optimizer state, saving."""

import io

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from strategies.training import (
    STEPS,
    adamw,
    batch,
    device_of,
    full,
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
    return ddp(rank, world_size, device_type, gradient_as_bucket_view=True, static_graph=True)


def ddp_with_small_buckets(rank, world_size, device_type):
    return ddp(rank, world_size, device_type, bucket_cap_mb=0.0005, find_unused_parameters=True)


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


def ddp_with_amp(rank, world_size, device_type):
    """float16 with a scaler, beside one GPU on the whole batch; the CPU casts other operators."""
    device = device_of(torch.accelerator.current_accelerator().type, rank)
    model = DDP(network(0).to(device))
    mine = _scaled(model, device, rank, 1)
    alone = _scaled(network(0).to(device), device, 0, world_size)
    together = torch.stack(mine)
    dist.all_reduce(together)
    torch.testing.assert_close(together / world_size, torch.stack(alone), rtol=2e-3, atol=2e-3)
    return mine


def _scaled(model, device, rank, shares):
    """Losses of three steps with autocast and a GradScaler, on this many ranks' samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    losses = []
    for step in range(STEPS):
        world_size = dist.get_world_size()
        parts = [batch(step, r, world_size) for r in range(rank, rank + shares)]
        images, labels = (torch.cat(part).to(device) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(full(loss))
    return losses


def ddp_with_join(rank, world_size, device_type):
    device = device_of(device_type, rank)
    model = DDP(network(rank).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        trained(model, optimizer, device, rank, world_size, steps=1 + rank)
    return parameters_of(model)


def zero_redundancy(rank, world_size, device_type):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    device = device_of(device_type, rank)
    model = DDP(network(rank).to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return trained(model, optimizer, device, rank, world_size) + parameters_of(model)


def saved_and_loaded(rank, world_size, device_type):
    """A wrapped model's state through torch.save, onto the rank's own device."""
    device = device_of(device_type, rank)
    model = DDP(network(rank).to(device))
    file = io.BytesIO()
    torch.save(model.module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=device)
    assert all(value.device == device for value in state.values())
    return [value.cpu() for value in state.values()]


WAYS = [
    ddp,
    ddp_with_bucket_views,
    ddp_with_small_buckets,
    ddp_accumulating,
    ddp_with_amp,
    ddp_with_join,
    zero_redundancy,
    saved_and_loaded,
]
