"""The table of collectives: each of torch's operators has a row, and each row is complete."""

import pytest
import torch
import torch.distributed.tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from toy_cluster import EXACT, collectives, toy

import vgpu
from vgpu.collectives.table import COLLECTIVES, NAMES, sent_bytes

# Operators that send nothing, that require CPU tensors and a backend named gloo, or that send to
# multiple ranks at once.
WITHOUT_A_ROW = {
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional::batch_p2p_ops",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::wait_tensors",
    "c10d::check_for_nan",
    "c10d::monitored_barrier_",
}


def test_every_collective_operator_in_torch_has_a_row():
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    operators = {name for name in names if name.startswith(("c10d::", "_c10d_functional::"))}
    assert operators - NAMES.keys() <= WITHOUT_A_ROW


@pytest.mark.virtual_gpus(2)
def test_an_operator_without_a_row_is_rejected():
    message = ["isend"], [0], [0], [torch.ones(2, device="vgpu:0")], "no group"
    with pytest.raises(NotImplementedError, match=r"batch_p2p_ops is not supported .*all_reduce"):
        torch.ops._c10d_functional.batch_p2p_ops(*message)
    with toy(1, 4), vgpu.shapes_only(), pytest.raises(NotImplementedError, match="batch_p2p_ops"):
        message[3][0] = torch.ones(2, device="vgpu:0")
        torch.ops._c10d_functional.batch_p2p_ops(*message)


def test_no_operator_has_two_rows():
    assert sum(len(each.operators) for each in COLLECTIVES.values()) == len(NAMES)


def test_a_ring_sends_all_parts_but_one():
    assert sent_bytes("all_gather", 400, 4) == sent_bytes("reduce_scatter", 400, 4) == 300
    assert sent_bytes("all_reduce", 400, 4) == 600
    with pytest.raises(NotImplementedError, match=r"all_reduce.*, not for scatter"):
        sent_bytes("scatter", 400, 4)


def test_resharding_a_dtensor_takes_an_all_to_all():
    with toy(1, 4), vgpu.shapes_only():
        mesh = init_device_mesh("vgpu", (4,))
        rows = distribute_tensor(torch.empty(400, 400, device="vgpu"), mesh, [Shard(0)])
        with vgpu.record(**EXACT) as timeline:
            columns = rows.redistribute(mesh, [Shard(1)]).to_local()
            columns.add_(1)
    assert columns.shape == (400, 100)
    (event,) = collectives(timeline)
    assert (event.name, event.size_bytes) == ("all_to_all", 400 * 100 * 4)
    (added,) = [event for event in timeline.events if event.name == "add_"]
    assert added.start_s == event.end_s
    assert timeline.races == []
