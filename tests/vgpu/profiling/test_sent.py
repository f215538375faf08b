"""What a rank sends in collectives: of plain tensors, of DTensors, in backward."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vgpu import launch
from vgpu.profiling import counted, counted_on_gpu, own_gpu
from vgpu.profiling.collective_counters import Sent


def plain(rank, world_size):
    return counted_on_gpu(rank, world_size, sent_by_plain)


def sent_by_plain(rank, world_size):
    small, large = torch.zeros(8, device=own_gpu()), torch.zeros(32, device=own_gpu())
    with Sent() as sent:
        dist.all_reduce(small)
        dist.all_gather_single(large, small)
        dist.all_gather([torch.empty_like(small) for _ in range(world_size)], small)
        dist.reduce_scatter_single(small, large)
        dist.reduce_scatter(small, list(large.chunk(world_size)))
        dist.all_to_all_single(torch.empty_like(small), small)
        dist.broadcast(small, src=0)
        functional.all_reduce(small, "sum", dist.group.WORLD).wait()
        functional.all_gather_single(small, 0, dist.group.WORLD).wait()
        functional.reduce_scatter_single(large, "sum", 0, dist.group.WORLD) + 1
        dist.barrier()
    return sent.calls, sent.size_bytes


def test_collectives_of_plain_tensors_and_the_bytes_of_the_whole_one():
    (calls, size_bytes), given = launch.run(plain, 4, gpu="V100")[0]
    assert calls == [
        ("all_reduce", 32),
        ("all_gather", 128),
        ("all_gather", 128),
        ("reduce_scatter", 128),
        ("reduce_scatter", 128),
        ("all_to_all", 32),
        ("broadcast", 32),
        # The functional ones, which are waited for when their result is used.
        ("all_reduce", 32),
        ("all_gather", 128),
        ("reduce_scatter", 128),
    ]
    assert size_bytes == 3 / 4 * (2 * 2 * 32 + 6 * 128 + 32) + 32
    # Numbers, not bytes, and of what is given only: however a collective is called.
    assert given == [
        ("all_reduce", 8),
        ("all_gather", 8),
        ("all_gather", 8),
        ("reduce_scatter", 32),
        ("reduce_scatter", 32),
        ("all_to_all", 8),
        ("broadcast", 8),
        ("all_reduce", 8),
        ("all_gather", 8),
        ("reduce_scatter", 32),
        ("barrier", given[-1][1]),
    ]


def with_dtensors(rank, world_size):
    mesh = init_device_mesh(own_gpu().type, (world_size,))
    local = torch.zeros(8, 8, device=own_gpu())
    with Sent() as sent:
        DTensor.from_local(local, mesh, [Shard(0)]).redistribute(
            placements=[Replicate()]
        ).to_local()
        DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
        DTensor.from_local(local, mesh, [Partial()]).redistribute(placements=[Shard(0)])
        weight = torch.zeros(8, 8, device=own_gpu(), requires_grad=True)
        whole = DTensor.from_local(weight, mesh, [Replicate()])
        (whole @ DTensor.from_local(local, mesh, [Shard(1)])).to_local().sum().backward()

    def functional(*_):
        DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        DTensor.from_local(local, mesh, [Partial()]).redistribute(placements=[Shard(0)])

    noted = counted(rank, world_size, functional)[1]
    return sent.calls, sent.names, [name for name, _ in noted]


def test_collectives_of_dtensors_and_of_backward():
    calls, names, noted = launch.run(with_dtensors, 4, gpu="V100")[0]
    assert calls == [
        ("all_gather", 4 * 256),
        ("all_to_all", 256),
        ("reduce_scatter", 256),
        ("all_reduce", 256),  # the gradient of what every rank holds
    ]
    assert names == [name for name, _ in calls]
    assert noted == ["all_gather", "reduce_scatter"]  # by the names that c10d's have, too


def other(rank, world_size):
    try:
        with Sent():
            dist.reduce(torch.zeros(2, device=own_gpu()), dst=0)
    except NotImplementedError as error:
        return str(error)


def test_what_it_cannot_count_is_refused():
    for message in launch.run(other, 2, gpu="V100"):
        assert "all_to_all, broadcast; c10d.reduce_.default is none of them" in message
