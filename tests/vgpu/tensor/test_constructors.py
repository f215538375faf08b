"""Tensors created from 0-dimensional ones, which torch reads with Python dispatch disabled."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vgpu

pytestmark = pytest.mark.virtual_gpus(2)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MAKERS = {
    "tensor": lambda a, b: torch.tensor([a, b]),
    "tensor, nested": lambda a, b: torch.tensor([[a, 1.0], [2.0, b]]),
    "tensor of single elements": lambda a, b: torch.tensor([a.reshape(1), b.reshape(1)]),
    "as_tensor": lambda a, b: torch.as_tensor([a, b]),
    "asarray": lambda a, b: torch.asarray([a, b]),
    "legacy": lambda a, b: torch.FloatTensor([a, b]),
    "new_tensor": lambda a, b: a.new_tensor([a, b]),
}
CONTEXTS = {
    "plain": nullcontext,
    "dispatch mode": Passing,
    "recording": vgpu.record,
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MAKERS)
def test_constructors_have_the_same_results_as_on_the_cpu(name, context):
    scalars = torch.tensor(1.5), torch.tensor(2)
    expected = MAKERS[name](*scalars)
    with CONTEXTS[context]():
        found = MAKERS[name](*(scalar.to("vgpu:1") for scalar in scalars))
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()
    assert found.device.type == ("vgpu" if name == "new_tensor" else "cpu")


FILLED = {
    "arange": lambda out: torch.arange(4, out=out),
    "eye": lambda out: torch.eye(2, 3, out=out),
    "full": lambda out: torch.full((4,), 2.0, out=out),
    "linspace": lambda out: torch.linspace(0, 1, 4, out=out),
    "rand": lambda out: torch.rand(4, out=out),
    "zeros": lambda out: torch.zeros(4, out=out),
    "nn.init.eye_": lambda out: torch.nn.init.eye_(out.resize_(2, 3)),
}


@pytest.mark.parametrize("name", FILLED)
def test_constructors_fill_a_tensor_under_a_default_device(name):
    def filled(device):
        torch.manual_seed(0)
        with torch.device(device):
            return FILLED[name](torch.empty(0))

    found = filled("vgpu:1")
    assert str(found.device) == "vgpu:1"
    torch.testing.assert_close(found.cpu(), filled("cpu"))


def test_a_tensor_on_the_cpu_is_not_filled_under_a_default_device():
    with (
        torch.device("vgpu:1"),
        pytest.raises(RuntimeError, match="device type vgpu does not match"),
    ):
        torch.zeros(4, out=torch.empty(4, device="cpu"))


def test_torch_tensor_copies_a_tensor_from_another_gpu():
    a = torch.tensor(1.5, device="vgpu:0")
    made = torch.tensor([a, 2.0], device="vgpu:1")
    assert made.tolist() == [1.5, 2.0]
    assert str(made.device) == "vgpu:1"


@pytest.mark.parametrize("device", [None, 1, "vgpu:1", "cpu"])
def test_asarray_shares_memory_only_on_the_same_device(device):
    x = torch.zeros(2, device="vgpu:1")
    shared = device != "cpu"
    torch.asarray(x, device=device).add_(1)
    assert x.tolist() == ([1, 1] if shared else [0, 0])
    torch.asarray(x, device=device, copy=True).add_(1)
    assert x.tolist() == ([1, 1] if shared else [0, 0])
    if not shared:
        with pytest.raises(ValueError, match="can't alias tensor from device 'vgpu:1' to 'cpu'"):
            torch.asarray(x, device=device, copy=False)


@pytest.mark.parametrize("function", [torch.abs, lambda x: x.sgn() * x])
def test_autograds_zero_tensors_can_be_read(function):
    found = []
    for device in ("cpu", "vgpu:1"):
        x = torch.tensor([-2.0, 0.0, 3.0], device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append(x.grad.cpu())
    assert torch.equal(*found)
    assert torch._efficientzerotensor((2, 3), device="vgpu:1").add(1).sum().item() == 6
