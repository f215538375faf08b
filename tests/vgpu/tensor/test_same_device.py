"""Operands that may be on a different device from the rest, where CUDA doesn't compare devices."""

import pytest
import torch
from torch import nn

import vgpu

TWO_DEVICES = "at least two devices"


@pytest.fixture(autouse=True)
def two_gpus():
    with vgpu.enable(2):
        yield


def on(index: int, *values: float) -> torch.Tensor:
    return torch.tensor(values, device=f"vgpu:{index}", dtype=torch.float32)


def of_both() -> list[torch.Tensor]:
    return [on(0, 1, 2), on(1, 3, 4)]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW([p], lr=torch.tensor(0.1), fused=True),
        lambda p: torch.optim.Adam([p], lr=torch.tensor(0.1), fused=True),
        lambda p: torch.optim.SGD([p], lr=torch.tensor(0.1), momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad([p], lr=torch.tensor(0.1), fused=True),
        lambda p: torch.optim.AdamW([p], lr=torch.tensor(0.1), foreach=True, capturable=True),
    ],
    ids=["AdamW", "Adam", "SGD", "Adagrad", "AdamW capturable"],
)
def test_the_learning_rate_may_be_a_tensor_on_the_cpu(make):
    weights = []
    for rate in ("cpu", "a number"):
        weight = nn.Parameter(on(0, 1, 2))
        optimizer = make(weight)
        if rate == "a number":
            optimizer.param_groups[0]["lr"] = 0.1
        for _ in range(3):
            weight.grad = weight.detach() * 2
            optimizer.step()
        weights.append(weight.detach())
    torch.testing.assert_close(*weights)


def test_a_learning_rate_on_another_gpu_is_rejected():
    weight = nn.Parameter(on(0, 1, 2))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="lr is on vgpu:1"):
        torch.optim.SGD([weight], lr=on(1, 0.1)[0], fused=True).step()


def test_foreach_runs_tensor_by_tensor_across_devices():
    tensors = of_both()
    torch._foreach_mul_(tensors, 3.0)
    assert [t.tolist() for t in tensors] == [[3, 6], [9, 12]]
    assert [t._version for t in tensors] == [1, 1]

    sums = torch._foreach_add(tensors, of_both())
    assert [str(t.device) for t in sums] == ["vgpu:0", "vgpu:1"]
    assert [t.tolist() for t in sums] == [[4, 8], [12, 16]]

    norms = torch._foreach_norm([on(1, 3, 4), torch.tensor([3.0, 4.0])])
    assert [(str(t.device), t.item()) for t in norms] == [("vgpu:1", 5), ("cpu", 5)]
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        torch._foreach_add([on(0, 1)], [on(1, 1)])


def test_foreach_accepts_a_scalar_on_the_cpu_but_not_on_another_gpu():
    (product,) = torch._foreach_mul([on(0, 1, 2)], torch.tensor(3.0))
    assert product.tolist() == [3, 6]
    with pytest.raises(RuntimeError, match="scalar tensor is expected to be on vgpu:0"):
        torch._foreach_mul_([on(0, 1)], on(1, 3)[0])


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: torch.select_scatter(x, y[0], 0, 1),
        lambda x, y: torch.slice_scatter(x, y[:1], 0, 1, 2),
        lambda x, y: torch.diagonal_scatter(x, y.diagonal()),
        lambda x, y: torch.as_strided_scatter(x, y[0], (2,), (1,)),
        lambda x, y: x.clone().index_fill_(0, x[0].long() * 0, y[0, 0]),
        lambda x, y: x.index_fill(0, x[0].long() * 0, y[0, 0]),
        lambda x, y: x.clone().bernoulli_(y),
    ],
    ids=["select", "slice", "diagonal", "as_strided", "fill_", "fill", "bernoulli_"],
)
@pytest.mark.parametrize("source", ["cpu", "vgpu:1"])
def test_a_few_operators_copy_a_source_from_another_device(operation, source):
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 2)
    result = operation(x.to("vgpu:0"), y.to(source))
    assert str(result.device) == "vgpu:0"
    assert result.tolist() == operation(x, y).tolist()
    with pytest.raises(RuntimeError, match="same device"):
        operation(x, y.to("vgpu:1"))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, s: x // s,
        lambda x, s: x.clone().floor_divide_(s),
        lambda x, s: x.clone().eq_(s),
        lambda x, s: x.clone().lt_(s),
        lambda x, s: torch.rsub(x, s),
        lambda x, s: torch.dist(x, s),
    ],
)
def test_elementwise_operators_without_the_tag_accept_a_cpu_scalar(operation):
    x, scalar = torch.tensor([1.0, 2.0]), torch.tensor(2.0)
    assert operation(x.to("vgpu:0"), scalar).tolist() == operation(x, scalar).tolist()
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        operation(x.to("vgpu:0"), torch.ones(2))
