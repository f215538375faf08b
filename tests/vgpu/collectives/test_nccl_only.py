"""NCCL-only and CUDA-only features: implemented differently, or rejected with a clear message."""

import torch
from cells import cell

from vgpu import launch

MESSAGES = """
def main(rank, world):
    import torch.distributed._symmetric_memory as symmetric
    x = torch.ones(4, device="vgpu")
    name = dist.group.WORLD.group_name

    class Options:
        pass

    uses = {
        "empty": lambda: symmetric.empty(4, device="vgpu"),
        "empty there": lambda: symmetric.empty(4, device=x.device),
        "rendezvous": lambda: symmetric.rendezvous(x, name),
        "pool": lambda: symmetric.get_mem_pool(x.device),
        "fused": lambda: torch.ops.symm_mem.fused_all_gather_matmul(
            x[None], [x[:, None]], gather_dim=0, group_name=name
        ),
        "options": lambda: dist.new_group(pg_options=Options()),
        "nccl": lambda: dist.new_group(backend="nccl"),
        "both": lambda: dist.new_group(backend="cpu:gloo,cuda:nccl"),
    }
    said = {}
    for kind, use in uses.items():
        try:
            use()
        except (NotImplementedError, RuntimeError) as error:
            said[kind] = type(error).__name__ + ": " + str(error)
    return said
"""


def test_nccl_only_features_are_rejected_with_a_clear_message():
    (said,) = launch.run(cell(MESSAGES)["main"], 1, gpu="V100")
    for kind in ("empty", "empty there", "rendezvous", "pool"):
        begin = "NotImplementedError: torch.distributed._symmetric_memory needs GPUs that read"
        assert said[kind].startswith(begin), kind
        assert "use the collectives of torch.distributed" in said[kind]
    assert said["fused"].startswith("NotImplementedError: operators that use symmetric memory")
    assert "virtual GPUs' backend vccl takes no options: leave out pg_options" in said["options"]
    for kind in ("nccl", "both"):
        assert "there are only virtual ones" in said[kind] and "use 'vccl'" in said[kind]


SPLIT = """
def main(rank, world):
    device = torch.device("vgpu", rank)
    # As init_process_group(device_id=...) sets it; on torch 2.11, a second gloo rendezvous may fail.
    dist.group.WORLD.bound_device_id = device
    from torch.distributed.device_mesh import init_device_mesh
    found = []
    mesh = init_device_mesh("vgpu", (2, 2), mesh_dim_names=("rows", "columns"))
    inner = mesh["columns"].get_group()
    deeper = dist.split_group(parent_pg=inner, split_ranks=[[1, 0]])
    pair = dist.split_group(split_ranks=[[0, 3]])
    for group in (mesh["rows"].get_group(), inner, pair, deeper):
        for x in (torch.tensor([10.0**rank], device=device), torch.tensor([10.0**rank])):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(x, group=group)
            found.append(x.item())
    return found
"""


def test_groups_are_split_if_the_default_group_names_its_device():
    ranks = launch.run(cell(SPLIT)["main"], 4, gpu="V100")
    rows, columns = {0: 101.0, 1: 1010.0}, {0: 11.0, 1: 1100.0}
    for rank, found in enumerate(ranks):
        pair = 1001.0 if rank in (0, 3) else 10.0**rank
        column = columns[rank // 2]
        expected = [rows[rank % 2], column, pair, column]
        assert found == [value for value in expected for _ in ("vgpu", "cpu")]


DIVIDED = """
def main(rank, world):
    from torch.distributed.fsdp import fully_shard
    found = []
    for kind in ("cpu", "vgpu"):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to(kind)
        model = fully_shard(model, mesh=dist.device_mesh.init_device_mesh(kind, (world,)))
        model.set_gradient_divide_factor(3.0)
        if kind == "cpu":  # gloo has no other way, and here it must be asked for
            model.set_force_sum_reduction_for_comms(True)
        model(torch.full((2, 4), rank + 1.0, device=kind)).square().sum().backward()
        found.append(model.weight.grad.full_tensor().cpu())
    return found
"""


def test_fsdp_divides_gradients_by_a_custom_factor():
    for on_cpu, on_gpu in launch.run(cell(DIVIDED)["main"], 2, gpu="V100"):
        assert on_cpu.abs().sum() > 0 and torch.equal(on_cpu, on_gpu)
