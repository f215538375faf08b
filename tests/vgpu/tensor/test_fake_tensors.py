"""Backward passes on fake tensors, which autograd sees on a virtual GPU."""

import contextlib

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.virtual_gpus(2)


def gradient(x):
    first, _ = torch.split((x * 2).to("vgpu:0").sin().cpu().to("vgpu:1"), 2)  # one part is unused
    return torch.autograd.grad(first.sum(), x)[0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_backward_pass_across_devices_can_be_traced(mode):
    x = torch.randn(4, device="vgpu:1", requires_grad=True)
    traced = make_fx(gradient, tracing_mode=mode)(x)
    assert "lazy" not in traced.code
    y = torch.randn(4, device="vgpu:1", requires_grad=True)
    found = traced(y)
    assert str(found.device) == "vgpu:1"
    torch.testing.assert_close(found, gradient(y), rtol=0, atol=0)


def test_fake_tensors_have_a_backward_pass_after_their_mode_ends():
    with FakeTensorMode():
        x = torch.ones(4, device="vgpu:1", requires_grad=True)
    (x * 2).sum().backward()
    assert str(x.grad.device) == "vgpu:1"
    assert repr(x.grad) == "FakeTensor(..., device='vgpu:1', size=(4,))"


def test_a_joint_graph_of_forward_and_backward_can_be_exported():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("vgpu:1")
    x = torch.randn(3, 4, device="vgpu:1")
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, net, (x,)).graph_module
    parameters = [*net.parameters()]
    upstream = torch.randn(3, 2, device="vgpu:1")
    (output,), gradients = joint([*parameters, x], [upstream])
    expected = net(x)
    torch.testing.assert_close(output, expected)
    for found, right in zip(
        gradients, torch.autograd.grad(expected, parameters, upstream), strict=False
    ):
        torch.testing.assert_close(found, right)
