"""Parameters sharded by FSDP, and a checkpoint read by fewer ranks than wrote it."""

import shutil
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from strategies.training import adamw, device_of, mesh_of, network, parameters_of, sgd, trained


def _sharded(rank, world_size, device_type, mesh=None, seed=0, norm=nn.LayerNorm, **options):
    from torch.distributed.fsdp import fully_shard

    device = device_of(device_type, rank)
    model = network(seed, norm=norm).to(device)
    mesh = mesh_of(device_type, world_size) if mesh is None else mesh
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options), device


def _fsdp(rank, world_size, device_type, mesh=None, **options):
    model, device = _sharded(rank, world_size, device_type, mesh, **options)
    # AdamW's operations are slow on a two-dimensional mesh; the one-dimensional mesh covers them.
    optimizer = adamw(model) if mesh is None else sgd(model)
    return trained(model, optimizer, device, rank, world_size, clip=1.0) + parameters_of(model)


def fsdp(rank, world_size, device_type):
    return _fsdp(rank, world_size, device_type)


def fsdp1(rank, world_size, device_type):
    """Train with the class that preceded ``fully_shard``."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = device_of(device_type, rank)
    model = FullyShardedDataParallel(network(0).to(device), device_id=device, use_orig_params=True)
    losses = trained(model, adamw(model), device, rank, world_size)
    return losses + [value.cpu() for value in model.state_dict().values()]


def fsdp_without_resharding(rank, world_size, device_type):
    return _fsdp(rank, world_size, device_type, reshard_after_forward=False)


def fsdp_in_mixed_precision(rank, world_size, device_type):
    """Train without a norm, whose statistics are float32 on a GPU and bfloat16 on the CPU."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fsdp(rank, world_size, device_type, norm=nn.Identity, mp_policy=policy)


def fsdp_with_offloading(rank, world_size, device_type):
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp(rank, world_size, device_type, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hybrid_sharding(rank, world_size, device_type):
    mesh = mesh_of(device_type, 2, world_size // 2, names=("replicate", "shard"))
    return _fsdp(rank, world_size, device_type, mesh)


def checkpoint_on_other_ranks(rank, world_size, device_type):
    """Write with all ranks; read with half of them, and into a plain model."""
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
    if rank == 0:  # every rank has read it
        shutil.rmtree(folder)
    expected = [p.detach() for p in network(3).parameters()]
    for mine in (found or expected, parameters_of(plain)):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    return found + parameters_of(plain)


WAYS = [
    fsdp,
    fsdp1,
    fsdp_without_resharding,
    fsdp_in_mixed_precision,
    fsdp_with_offloading,
    hybrid_sharding,
    checkpoint_on_other_ranks,
]
