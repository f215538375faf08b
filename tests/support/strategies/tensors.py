"""Split tensors: DTensors, tensor and sequence parallelism, attention by heads, ring attention."""

import torch
from torch.nn import functional as F

from strategies.training import (
    STEPS,
    batch,
    device_of,
    full,
    mesh_of,
    network,
    parameters_of,
    sgd,
    trained,
)


def dtensor_placements(rank, world_size, device_type):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(device_type, world_size)
    torch.manual_seed(1)
    whole = torch.randn(8, 8)
    left = distribute_tensor(whole.to(device_of(device_type, rank)), mesh, [Shard(0)])
    right = distribute_tensor(whole.t().to(device_of(device_type, rank)), mesh, [Shard(1)])
    left.requires_grad_()
    product = left.redistribute(mesh, [Shard(1)]) @ right.redistribute(mesh, [Shard(0)])
    assert product.placements[0].is_partial()
    product.redistribute(mesh, [Replicate()]).square().sum().backward()
    assert left.device == left.to_local().device
    return [full(product), full(left.grad), full(left.norm()), full(left.to(left.device))]


def _parallelized(rank, world_size, device_type, sequence):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if sequence:
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
            "1": SequenceParallel(sequence_dim=0),
            "3": ColwiseParallel(input_layouts=Shard(0)),
            "5": RowwiseParallel(),
        }
    else:
        plan = {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "3": ColwiseParallel(),
            "5": RowwiseParallel(),
        }
    model = network(0).to(device_of(device_type, rank))
    return parallelize_module(model, mesh_of(device_type, world_size), plan)


def _train_together(model, rank, world_size, device_type, inputs_of=lambda x: x):
    device = device_of(device_type, rank)
    # Some parameters are DTensors and some aren't: foreach, the default on GPUs, can't mix the two.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for step in range(STEPS):
        images, labels = (part.to(device) for part in batch(step, 0, 1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs_of(images)), labels)
        loss.backward()
        optimizer.step()
        found.append(full(loss))
    return found + parameters_of(model)


def tensor_parallel(rank, world_size, device_type):
    model = _parallelized(rank, world_size, device_type, sequence=False)
    return _train_together(model, rank, world_size, device_type)


def sequence_parallel(rank, world_size, device_type):
    model = _parallelized(rank, world_size, device_type, sequence=True)
    return _train_together(
        model, rank, world_size, device_type, lambda x: x.chunk(world_size)[rank]
    )


def attention_by_heads(rank, world_size, device_type):
    """Run attention on DTensors split by heads; on the CPU, which has no rule, on local tensors."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = mesh_of(device_type, world_size)
    generator = torch.Generator().manual_seed(rank)
    parts = [torch.randn(2, 1, 16, 8, generator=generator) for _ in range(3)]
    parts = [part.to(device_of(device_type, rank)).requires_grad_() for part in parts]
    whole = [DTensor.from_local(part, mesh, [Shard(1)]) for part in parts]
    if device_type == "cpu":
        output = F.scaled_dot_product_attention(*parts, is_causal=True)
    else:
        output = F.scaled_dot_product_attention(*whole, is_causal=True).to_local()
    output.square().sum().backward()
    return [full(output), *(full(part.grad) for part in parts)]


def context_parallel(rank, world_size, device_type):
    """Compare ring attention over a split sequence with full attention on each rank.

    A rank has two parts of 32 positions: CUDA's kernel pads its logsumexp to a multiple of 32, and
    torch's ring attention accepts no other sizes.
    """
    torch.manual_seed(2)
    parts = [torch.randn(1, 2, 64 * world_size, 8) for _ in range(3)]
    parts = [part.to(device_of(device_type, rank)).requires_grad_() for part in parts]
    expected = F.scaled_dot_product_attention(*parts, is_causal=True)
    if device_type == "cpu":  # which has no context parallelism
        return [full(expected)]
    from torch.distributed.tensor.experimental import context_parallel as ring
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = mesh_of(device_type, world_size)
    mine = [part.detach().clone() for part in parts]
    with ring(mesh, buffers=mine, buffer_seq_dims=[2] * 3):
        output = F.scaled_dot_product_attention(*mine, is_causal=True)
        (output,) = context_parallel_unshard(mesh, [output], [2])
    torch.testing.assert_close(output, expected.detach())
    return [full(expected)]


def fsdp_and_tensor_parallel(rank, world_size, device_type):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh_of(device_type, world_size // 2, 2, names=("dp", "tp"))
    device = device_of(device_type, rank)
    model = network(0).to(device)
    plan = {"3": ColwiseParallel(), "5": RowwiseParallel()}
    model = fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    optimizer = sgd(model)
    group = mesh["dp"].get_local_rank()
    return trained(model, optimizer, device, group, world_size // 2) + parameters_of(model)


WAYS = [
    dtensor_placements,
    tensor_parallel,
    sequence_parallel,
    attention_by_heads,
    context_parallel,
    fsdp_and_tensor_parallel,
]
