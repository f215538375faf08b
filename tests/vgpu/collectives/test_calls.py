"""What collectives reject: wrong arguments, and two ranks on one GPU."""

import pytest
import torch
import torch.distributed as dist
from cells import cell

import vgpu
from vgpu import launch
from vgpu.launch.launcher import free_port


def errors_of_wrong_calls(device):
    """Return what each wrong call raises on the last of two ranks."""
    import torch
    import torch.distributed as dist

    def ones(*size, **kwargs):
        return torch.ones(*size, device=device, **kwargs)

    transposed, half, pair = ones(2, 3).t(), {"dtype": torch.half}, [ones(2), ones(2)]
    reduce_scatter, all_gather = dist.reduce_scatter_single, dist.all_gather_single
    calls = {
        "all_reduce, transposed": lambda: dist.all_reduce(transposed),
        "broadcast, transposed": lambda: dist.broadcast(transposed, 0),
        "reduce, transposed": lambda: dist.reduce(transposed, 0),
        "all_gather, transposed input": lambda: all_gather(ones(6, 2), transposed),
        "all_gather, transposed output": lambda: all_gather(ones(2, 6).t(), ones(3, 2)),
        "reduce_scatter, transposed input": lambda: reduce_scatter(ones(3, 2), ones(2, 6).t()),
        "all_to_all_single, transposed": lambda: dist.all_to_all_single(ones(2, 2).t(), ones(2, 2)),
        "all_to_all, transposed": lambda: dist.all_to_all([ones(2, 2).t()] * 2, [ones(2, 2)] * 2),
        "all_gather, types": lambda: all_gather(ones(4, **half), ones(2)),
        "all_gather, sizes": lambda: all_gather(ones(5), ones(2)),
        "reduce_scatter, sizes": lambda: reduce_scatter(ones(3), ones(4)),
        "all_gather, a list of three": lambda: dist.all_gather([*pair, ones(2)], ones(2)),
        "all_gather, own part": lambda: dist.all_gather([ones(2), ones(3)], ones(2)),
        "reduce_scatter, own part": lambda: dist.reduce_scatter(ones(3), pair),
        "gather, sizes": lambda: dist.gather(ones(2), [ones(2), ones(3)], dst=1),
        "scatter, sizes": lambda: dist.scatter(ones(3), pair, src=1),
        "all_to_all_single, sizes": lambda: dist.all_to_all_single(ones(6), ones(4)),
        "all_to_all_single, rows": lambda: dist.all_to_all_single(ones(5), ones(4)),
        "all_to_all_single, splits": lambda: dist.all_to_all_single(
            ones(4), ones(4), [1, 1], [2, 2]
        ),
        "all_to_all_single, three": lambda: dist.all_to_all_single(
            ones(4), ones(4), None, [2, 1, 1]
        ),
        "all_to_all, a list of one": lambda: dist.all_to_all([ones(2)], [ones(2)]),
        "broadcast, root": lambda: dist.broadcast(ones(2), 9),
        "send, peer": lambda: dist.send(ones(2), 9),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
        else:
            errors[name] = "none"
    return errors


def wrong_and_right_calls(rank, world, errors_of_wrong_calls):
    device = torch.device("vgpu", rank)
    errors = errors_of_wrong_calls(device) if rank else {}
    dist.barrier()
    row, images = torch.ones(2, 2, device=device)[1], torch.ones(2, 3, 4, 4, device=device)
    dist.all_reduce(row)
    images = images.to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    gathered = torch.empty(4, 3, 4, 4, device=device).to(memory_format=torch.channels_last)
    dist.all_gather_single(gathered, images + rank)
    parts = [torch.empty(1 + each, device=device) for each in range(2)]
    work = dist.all_gather(parts, torch.full((1 + rank,), 7.0 + rank, device=device), async_op=True)
    work.wait()
    assert [part.tolist() for part in parts] == [[7], [8, 8]]
    with dist._coalescing_manager(device=device):
        for part in parts:
            dist.all_reduce(part)
    assert [part.tolist() for part in parts] == [[14], [16, 16]]
    return errors, row.tolist(), images.sum().item(), gathered.sum(dim=(1, 2, 3)).tolist()


def test_ranks_and_a_cluster_reject_the_same_wrong_calls():
    ranks = launch.run(wrong_and_right_calls, 2, errors_of_wrong_calls, gpu="V100")
    errors = ranks[1][0]
    for _, *done in ranks:  # contiguous and channels-last tensors are one block of memory
        assert done == [[2, 2], 192, [96, 96, 144, 144]]
    with vgpu.cluster(hosts=1, gpus_per_host=2, rank=1) as cluster, vgpu.shapes_only():
        assert errors_of_wrong_calls(cluster.device) == errors
    words = {
        "transposed": "ValueError: Tensors must be contiguous",
        "all_gather, types": "TypeError: all_gather: output tensor must have the same type",
        "all_gather, sizes": "ValueError: all_gather among 2 ranks got an input of 2 elements and an output of 5",
        "reduce_scatter, sizes": "ValueError: reduce_scatter among 2 ranks got an input of 4 elements",
        "a list of": " tensors: it needs one for each rank",
        "own part": "rank 1 of the group sends itself 2 elements, but has room for 3",
        "gather, sizes": "invalid tensor size at index 1 (expected [2], got [3])",
        "scatter, sizes": "invalid tensor size at index 0 (expected [3], got [2])",
        "single, sizes": "rank 1 of the group sends itself 2 elements, but has room for 3",
        "single, rows": "RuntimeError: Tensor's dim 0 does not divide equally across group size",
        "single, splits": "RuntimeError: Split sizes doesn't match total dim 0 size",
        "single, three": "RuntimeError: Number of tensor splits not equal to group size",
        "root": "ValueError: broadcast: invalid root rank: 9; the group has ranks 0 to 1",
        "peer": "ValueError: send: invalid peer rank: 9; the group has ranks 0 to 1",
    }
    for name, message in errors.items():
        assert any(part in name and phrase in message for part, phrase in words.items()), (
            name,
            message,
        )


def test_a_group_rejects_two_ranks_on_one_gpu_as_nccl_does():
    main = cell(
        """
        def main(rank, world_size):
            alone = dist.new_group([0])
            for index in (rank, 1 - rank):  # a communicator each
                dist.all_reduce(torch.ones(2, device=torch.device("vgpu", index)))
            if rank == 0:
                dist.all_reduce(torch.ones(2, device="vgpu:1"), group=alone)
            if rank == 1:
                os.environ["CUDA_VISIBLE_DEVICES"] = "1"
                dist.all_reduce(torch.ones(2, device="vgpu:0"), group=dist.new_group([0, 1]))
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                dist.all_reduce(torch.ones(2, device="vgpu:0"), group=dist.new_group([0, 1]))
            dist.all_reduce(torch.ones(2, device="vgpu:0"), group=dist.new_group([0, 1]))
        """
    )["main"]
    words = r"Duplicate GPU detected : rank (0 and rank 1|1 and rank 0) both on CUDA device 0"
    with pytest.raises(RuntimeError, match=words):
        launch.run(main, 2, gpu="V100")


def test_a_group_rejects_a_tensor_on_another_gpu_as_nccl_does():
    main = cell(
        """
        def main(rank, world_size):
            dist.destroy_process_group()
            dist.init_process_group(
                "vccl", store=dist.HashStore(), rank=0, world_size=1,
                device_id=torch.device("vgpu", rank),
            )
            dist.all_reduce(torch.ones(2, device=f"vgpu:{rank}"))
            dist.all_reduce(torch.ones(2, device=f"vgpu:{rank}"), group=dist.new_group([0]))
            dist.all_reduce(torch.ones(2, device=f"vgpu:{1 - rank}"))
        """
    )["main"]
    words = (
        r"not on device passed to init_process_group.*CUDA device (1.*device_id 0|0.*device_id 1)"
    )
    with pytest.raises(RuntimeError, match=words):
        launch.run(main, 2, gpu="V100")


def test_a_collective_rejects_dtypes_of_equal_size_that_differ_among_ranks():
    """This also holds after more collectives than a group keeps keys for."""
    main = cell(
        """
        def main(rank, world_size):
            for dtype in (torch.float32, torch.bfloat16) * 150:
                dist.all_reduce(torch.ones(2, device="vgpu", dtype=dtype))
            dtype = torch.float16 if rank else torch.bfloat16
            dist.all_reduce(torch.ones(2, device="vgpu", dtype=dtype))
        """
    )["main"]
    words = (
        r"all_reduce: rank (0 of the group passes torch\.bfloat16, but rank 1 passes "
        r"torch\.float16|1 of the group passes torch\.float16, but rank 0 passes torch\.bfloat16)"
    )
    with pytest.raises(RuntimeError, match=words):
        launch.run(main, 2, gpu="V100")


def test_a_groups_collectives_still_run_after_the_rank_that_served_its_store_has_exited():
    main = cell(
        """
        def main(rank, world_size, port):
            dist.destroy_process_group()
            store = dist.TCPStore("localhost", port, world_size, is_master=rank == 0)
            dist.init_process_group("vccl", store=store, rank=rank, world_size=world_size)
            group = dist.new_group([1, 2])
            x = torch.ones(2, device="vgpu")
            if rank == 0:
                store.get("done")
                dist.destroy_process_group()
                return x.tolist()  # the store ends with its last reference
            dist.all_reduce(x, group=group)
            store.set("done", "")
            try:
                while True:
                    store.check(["anything"])
            except dist.DistError:
                dist.all_reduce(x, group=group)
            return x.tolist()
        """
    )["main"]
    results = launch.run(main, 3, free_port(), gpu="V100", timeout_s=60)
    assert results == [[1, 1], [4, 4], [4, 4]]
