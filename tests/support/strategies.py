"""Ways to train on several ranks, each the same few steps on whatever device type is asked for.

Every function here is called on each rank as ``way(rank, world_size, device_type)`` with a process
group in place. It returns what must not depend on the device type: losses, norms and parameters,
as CPU tensors.
"""

import io
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 3


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def device_of(device_type, rank):
    return torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")


def network(seed, width=16):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, 4),
    )  # fmt: skip


def batch(step, rank, world_size):
    """This rank's four samples of the step's batch, on the CPU."""
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(4 * world_size, 8, generator=generator)
    labels = torch.randint(0, 4, (4 * world_size,), generator=generator)
    mine = slice(4 * rank, 4 * rank + 4)
    return images[mine], labels[mine]


def trained(model, optimizer, device, rank, world_size, steps=STEPS, clip=None):
    """Losses (and norms) of the steps."""
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
    """A tensor, or the whole of a DTensor, on the CPU."""
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.cpu().clone()


def parameters_of(model):
    return [full(parameter) for parameter in model.parameters()]


def mesh_of(device_type, *shape, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, shape, mesh_dim_names=names)


# DDP


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


# FSDP2


def _sharded(rank, world_size, device_type, mesh=None, seed=0, **options):
    from torch.distributed.fsdp import fully_shard

    device = device_of(device_type, rank)
    model = network(seed).to(device)
    mesh = mesh_of(device_type, world_size) if mesh is None else mesh
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options), device


def _fsdp(rank, world_size, device_type, mesh=None, **options):
    model, device = _sharded(rank, world_size, device_type, mesh, **options)
    # On a mesh of two dimensions torch takes a while over what AdamW does, and it is on one.
    optimizer = adamw(model) if mesh is None else sgd(model)
    return trained(model, optimizer, device, rank, world_size, clip=1.0) + parameters_of(model)


def fsdp(rank, world_size, device_type):
    return _fsdp(rank, world_size, device_type)


def fsdp_without_resharding(rank, world_size, device_type):
    return _fsdp(rank, world_size, device_type, reshard_after_forward=False)


def fsdp_with_prefetching(rank, world_size, device_type):
    model, device = _sharded(rank, world_size, device_type)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    layers[-1].set_modules_to_backward_prefetch(layers[:-1])
    optimizer = adamw(model)
    return trained(model, optimizer, device, rank, world_size) + parameters_of(model)


def fsdp_in_mixed_precision(rank, world_size, device_type):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fsdp(rank, world_size, device_type, mp_policy=policy)


def fsdp_with_offloading(rank, world_size, device_type):
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp(rank, world_size, device_type, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hybrid_sharding(rank, world_size, device_type):
    mesh = mesh_of(device_type, 2, world_size // 2, names=("replicate", "shard"))
    return _fsdp(rank, world_size, device_type, mesh)


# Tensors


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
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh_of(device_type, world_size)
    model = network(0).to(device_of(device_type, rank))
    plan = {"0": ColwiseParallel(), "3": ColwiseParallel(), "5": RowwiseParallel()}
    if sequence:
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
            "1": SequenceParallel(sequence_dim=0),
            "3": ColwiseParallel(input_layouts=Shard(0)),
            "5": RowwiseParallel(),
        }
    else:
        plan["0"] = ColwiseParallel(output_layouts=_replicate())
    return parallelize_module(model, mesh, plan), mesh


def _replicate():
    from torch.distributed.tensor import Replicate

    return Replicate()


def _train_together(model, rank, world_size, device_type, inputs_of=lambda x: x):
    device = device_of(device_type, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    model, _ = _parallelized(rank, world_size, device_type, sequence=False)
    return _train_together(model, rank, world_size, device_type)


def sequence_parallel(rank, world_size, device_type):
    model, _ = _parallelized(rank, world_size, device_type, sequence=True)
    return _train_together(
        model, rank, world_size, device_type, lambda x: x.chunk(world_size)[rank]
    )


def loss_over_a_split_vocabulary(rank, world_size, device_type):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    device = device_of(device_type, rank)
    torch.manual_seed(0)
    model = nn.Linear(8, 12).to(device)
    plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(model, mesh_of(device_type, world_size), plan)
    images, labels = (part.to(device) for part in batch(0, 0, 1))
    with loss_parallel():
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
    return [full(loss), full(model.weight.grad)]


def attention_by_heads(rank, world_size, device_type):
    """Fused attention on DTensors that are split by heads; by hand where the CPU has no rule."""
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
    """Ring attention over a sequence that is split, beside full attention on each rank."""
    torch.manual_seed(2)
    parts = [torch.randn(1, 2, 8 * world_size, 8) for _ in range(3)]
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


# Pipelines and checkpoints


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


def one_forward_one_backward(rank, world_size, device_type):
    return _pipeline(rank, world_size, device_type, "Schedule1F1B")


def interleaved(rank, world_size, device_type):
    return _pipeline(rank, world_size, device_type, "ScheduleInterleaved1F1B", 2)


def zero_bubble(rank, world_size, device_type):
    return _pipeline(rank, world_size, device_type, "ScheduleInterleavedZeroBubble", 2)


def checkpoint_on_other_ranks(rank, world_size, device_type):
    """Write with all ranks, read with half of them, and into a plain model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    model, device = _sharded(rank, world_size, device_type, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        half = dist.new_group(list(range(world_size // 2)))
        found = []
        if rank < world_size // 2:
            from torch.distributed.device_mesh import DeviceMesh

            mesh = DeviceMesh.from_group(half, device_type)
            other, _ = _sharded(rank, world_size // 2, device_type, mesh, seed=4)
            state = {"model": get_model_state_dict(other)}
            dcp.load(state, checkpoint_id=folder, process_group=half)
            set_model_state_dict(other, state["model"])
            found = parameters_of(other)
        plain = network(5).to(device)
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        plain.load_state_dict(state["model"])
    dist.barrier()
    expected = [p.detach() for p in network(3).parameters()]
    for mine in (found or expected, parameters_of(plain)):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    return found + parameters_of(plain)


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


def beside_one_process(way):
    """What one process gets on the whole batch, for ways that train ``network(0)`` by the batch."""
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


WAYS = {
    "data": [
        ddp, ddp_with_bucket_views, ddp_with_small_buckets, ddp_accumulating, ddp_with_amp,
        ddp_with_join, zero_redundancy, saved_and_loaded,
    ],
    "sharded": [
        fsdp, fsdp_without_resharding, fsdp_with_prefetching, fsdp_in_mixed_precision,
        fsdp_with_offloading, hybrid_sharding, checkpoint_on_other_ranks,
    ],
    "tensors": [
        dtensor_placements, tensor_parallel, sequence_parallel, loss_over_a_split_vocabulary,
        attention_by_heads, context_parallel, fsdp_and_tensor_parallel,
    ],
    "pipelines": [gpipe, one_forward_one_backward, interleaved, zero_bubble],
}  # fmt: skip
"""By what is split; the ways of one group run on the same ranks, one after another."""


def both(rank, world_size, ways):
    """What each way gives on the CPU, and what on this rank's GPU, real or virtual."""
    found = {}
    for way in ways:
        results = []
        for device_type in ("cpu", torch.accelerator.current_accelerator().type):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(way(rank, world_size, device_type))
        found[way.__name__] = results
    return found
