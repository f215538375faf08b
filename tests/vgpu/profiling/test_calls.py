"""The record of operations: names in order, and which of them copy."""

import torch

from teaching.lessons import ROOT
from vgpu.profiling import Calls
from vgpu.profiling.watching import collective_name


def test_operations_are_named_in_order():
    with Calls() as calls:
        _ = torch.zeros(3) + 1
    assert calls.names == ["zeros", "add"]
    assert calls.copies == 0


def test_arguments_are_noted():
    with Calls() as calls:
        torch.ones(2).to(torch.float64)
    assert calls.made == ["ones(device=cpu)", "_to_copy(dtype=torch.float64)"]


def test_copies_are_counted_and_views_are_not():
    x = torch.ones(4)
    with Calls() as calls:
        assert x.to("cpu") is x
        _ = x.view(2, 2)
    assert calls.copies == 0
    with Calls() as calls:
        x.to(torch.float64)
        x.clone()
        torch.empty(4).copy_(x)
    assert calls.copies == 3


def test_nothing_is_recorded_outside_the_block():
    with Calls() as calls:
        torch.ones(2)
    torch.ones(2)
    assert calls.names == ["ones"]


def test_collectives_have_one_name_each():
    functional = torch.ops._c10d_functional
    found = [
        *(functional.reduce_scatter_tensor.default, torch.ops.c10d._reduce_scatter_base_.default),
        *(functional.all_gather_into_tensor.default, torch.ops.c10d.allgather_.default),
    ]
    names = [collective_name(operator) for operator in found]
    assert names == ["reduce_scatter"] * 2 + ["all_gather"] * 2


def test_no_mode_imports_the_compiler():
    for file in [*(ROOT / "vgpu").rglob("*.py"), *(ROOT / "helpers").rglob("*.py")]:
        text = file.read_text("utf-8")
        assert "(TorchDispatchMode)" not in text or "_should_skip_dynamo" in text, file
