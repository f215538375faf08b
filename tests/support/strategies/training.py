"""What all ways share: a network, its batches and optimizers, and the parts of a step."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 3


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def device_of(device_type, rank):
    return torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")


def network(seed, width=16, norm=nn.LayerNorm):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, width), norm(width), nn.GELU(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, 4),
    )  # fmt: skip


def batch(step, rank, world_size):
    """Return this rank's four samples of the step's batch, on the CPU."""
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(4 * world_size, 8, generator=generator)
    labels = torch.randint(0, 4, (4 * world_size,), generator=generator)
    mine = slice(4 * rank, 4 * rank + 4)
    return images[mine], labels[mine]


def trained(model, optimizer, device, rank, world_size, steps=STEPS, clip=None):
    """Train for ``steps`` steps; return the losses, and gradient norms if they're clipped."""
    found = []
    for step in range(steps):
        images, labels = (part.to(device) for part in batch(step, rank, world_size))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            found.append(full(norm))
        optimizer.step()
        found.append(full(loss))
    return found


def full(value):
    """Return a tensor, or a DTensor's full tensor, on the CPU."""
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.cpu().clone()


def parameters_of(model):
    return [full(parameter) for parameter in model.parameters()]


def mesh_of(device_type, *shape, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def beside_one_process(way):
    """Return parameters that one process gets from the full batches, for data-parallel ways."""
    world_size = 4
    model = network(0)
    optimizer = sgd(model) if way in ("ddp", "hybrid_sharding") else adamw(model)
    for step in range(STEPS):
        images, labels = (
            torch.cat(parts)
            for parts in zip(*(batch(step, r, world_size) for r in range(world_size)), strict=True)
        )
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return parameters_of(model)
