"""Operator logs, and bytes sent in collectives: of plain tensors, of DTensors, and in backward."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from teaching.lessons import ROOT
from vgpu import launch
from vgpu.profiling import (
    CollectiveCounter,
    OperatorLog,
    count_collectives,
    count_collectives_on_gpu,
    own_gpu,
)


def test_a_log_names_operators_in_order():
    with OperatorLog() as log:
        _ = torch.zeros(3) + 1
    assert log.names == ["zeros", "add"]
    assert log.copies == 0


def test_a_log_has_keyword_arguments():
    with OperatorLog() as log:
        torch.ones(2).to(torch.float64)
    assert log.lines == ["ones(device=cpu)", "_to_copy(dtype=torch.float64)"]


def test_a_log_counts_copies_but_not_views():
    x = torch.ones(4)
    with OperatorLog() as log:
        assert x.to("cpu") is x
        _ = x.view(2, 2)
    assert log.copies == 0
    with OperatorLog() as log:
        x.to(torch.float64)
        x.clone()
        torch.empty(4).copy_(x)
    assert log.copies == 3


def test_a_log_ends_with_its_block():
    with OperatorLog() as log:
        torch.ones(2)
    torch.ones(2)
    assert log.names == ["ones"]


def test_no_dispatch_mode_imports_the_compiler():
    for file in [*(ROOT / "vgpu").rglob("*.py"), *(ROOT / "helpers").rglob("*.py")]:
        text = file.read_text("utf-8")
        assert "(TorchDispatchMode)" not in text or "_should_skip_dynamo" in text, file


# On ranks


def plain(rank, world_size):
    return count_collectives_on_gpu(rank, world_size, sent_by_plain)


def sent_by_plain(rank, world_size):
    small, large = torch.zeros(8, device=own_gpu()), torch.zeros(32, device=own_gpu())
    with CollectiveCounter() as sent:
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
    return sent.calls, sent.sent_bytes


def test_collectives_of_plain_tensors_count_the_full_tensors_bytes():
    (calls, size_bytes), given = launch.run(plain, 4, gpu="V100")[0]
    assert calls == [
        ("all_reduce", 32),
        ("all_gather", 128),
        ("all_gather", 128),
        ("reduce_scatter", 128),
        ("reduce_scatter", 128),
        ("all_to_all", 32),
        ("broadcast", 32),
        # Functional collectives, which are waited for when their results are used.
        ("all_reduce", 32),
        ("all_gather", 128),
        ("reduce_scatter", 128),
    ]
    assert size_bytes == 3 / 4 * (2 * 2 * 32 + 6 * 128 + 32) + 32
    # Elements, not bytes, and only those passed in, however a collective is called.
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


def message(rank, world_size):
    x = torch.zeros(8, device=own_gpu())
    with CollectiveCounter() as sent:
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return sent.calls, sent.sent_bytes


def test_a_message_counts_on_both_ranks_and_is_sent_by_one():
    results = launch.run(count_collectives_on_gpu, 2, message, gpu="V100")
    assert results == [
        (([("send", 32)], 32), [("send", 8)]),
        (([("recv", 32)], 0), [("recv", 8)]),
    ]


def with_dtensors(rank, world_size):
    mesh = init_device_mesh(own_gpu().type, (world_size,))
    local = torch.zeros(8, 8, device=own_gpu())
    with CollectiveCounter() as sent:
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

    noted = count_collectives(rank, world_size, functional)[1]
    return sent.calls, sent.names, [name for name, _ in noted]


def test_collectives_of_dtensors_and_in_backward_are_counted():
    calls, names, noted = launch.run(with_dtensors, 4, gpu="V100")[0]
    assert calls == [
        ("all_gather", 4 * 256),
        ("all_to_all", 256),
        ("reduce_scatter", 256),
        ("all_reduce", 256),  # the gradient of the replicated weight
    ]
    assert names == [name for name, _ in calls]
    assert noted == ["all_gather", "reduce_scatter"]  # under the same names as c10d's


def in_callbacks(rank, world_size):
    """Count an all-reduce and those in futures' callbacks, some of them on another thread."""

    def all_reduce(count):
        return dist.all_reduce(torch.zeros(count, device=own_gpu()), async_op=True)

    def second(done):
        all_reduce(4).wait()
        return threading.get_ident()

    with CollectiveCounter() as sent:
        all_reduce(8).get_future().then(second).wait()
        ready = torch.futures.Future()
        ready.set_result(None)
        ready.then(second)  # runs immediately
        later = torch.futures.Future()
        on_thread = later.then(second)
        thread = threading.Thread(target=later.set_result, args=(None,))
        thread.start()
        thread.join()
    elsewhere = on_thread.wait() != threading.get_ident()
    all_reduce(8).get_future().then(second).wait()  # after the block
    return sent.calls, sent.sent_bytes, elsewhere


def test_collectives_in_a_futures_callback_are_counted():
    """PowerSGD's hook calls its all-reduces there, on a thread other than the caller's."""
    for calls, size_bytes, elsewhere in launch.run(in_callbacks, 2, gpu="V100"):
        assert calls == [("all_reduce", 32)] + 3 * [("all_reduce", 16)]
        assert size_bytes == 32 + 3 * 16
        assert elsewhere


def refused(rank, world_size):
    """Return the errors for a counted gather and for an all-reduce of a CPU tensor."""
    x = torch.zeros(2, device=own_gpu())
    parts = [torch.empty_like(x) for _ in range(world_size)] if rank == 0 else None
    with CollectiveCounter(), pytest.raises(NotImplementedError) as uncounted:
        dist.gather(x, parts)

    def on_cpu(rank, world_size):
        dist.all_gather_object([None] * world_size, "text")  # as bytes on the CPU
        dist.all_reduce(torch.zeros(2))

    with pytest.raises(TypeError) as misplaced:
        count_collectives_on_gpu(rank, world_size, on_cpu)
    return str(uncounted.value), str(misplaced.value)


def test_counters_reject_a_gather_and_a_cpu_tensor_on_a_rank_with_a_gpu():
    uncounted, misplaced = launch.run(refused, 2, gpu="V100")[0]
    assert uncounted.startswith("the bytes that a rank sends are counted only for all_reduce")
    assert "not for gather" in uncounted
    assert "all_reduce was given a CPU tensor, and NCCL" in misplaced
