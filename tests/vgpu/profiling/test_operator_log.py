"""The log of operators: names in order, and which of them copy."""

import torch

from teaching.lessons import ROOT
from vgpu.profiling import OperatorLog


def test_a_log_names_operators_in_order():
    with OperatorLog() as log:
        _ = torch.zeros(3) + 1
    assert log.names == ["zeros", "add"]
    assert log.copies == 0


def test_a_log_has_keyword_arguments():
    with OperatorLog() as log:
        torch.ones(2).to(torch.float64)
    assert log.lines == ["ones(device=cpu)", "_to_copy(dtype=torch.float64)"]


def test_a_log_counts_copies_and_no_views():
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
