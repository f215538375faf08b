"""Softmax of float16 in float32 by one kernel, and logsigmoid, which keeps nothing but its input."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import vgpu

pytestmark = pytest.mark.virtual_gpus(2)

MIB = 2**20


def in_float32(name, x):
    return getattr(F, name)(x, -1, dtype=torch.float32)


@contextlib.contextmanager
def bytes_of():
    """MiB allocated at most in the block, and in the end, beyond those at its start."""
    torch.vgpu.reset_peak_memory_stats()
    before, found = torch.vgpu.memory_allocated(), []
    yield found
    for count in (torch.vgpu.max_memory_allocated(), torch.vgpu.memory_allocated()):
        found.append((count - before) // MIB)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shapes", [False, True], ids=["values", "shapes"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by", ["dtype", "autocast"])
def test_float16_needs_no_copy_and_bfloat16_does(name, shapes, mode, by):
    """SoftMax.cpp: half_to_float is for Half; bfloat16 is converted first."""
    with vgpu.shapes_only() if shapes else contextlib.nullcontext(), mode():
        for dtype, peak in ((torch.float16, 4), (torch.bfloat16, 8)):
            x = torch.randn(1024, 1024, device="vgpu:0", dtype=dtype)
            with torch.autocast("vgpu", dtype, enabled=by == "autocast"), bytes_of() as found:
                out = getattr(F, name)(x, -1) if by == "autocast" else in_float32(name, x)
            assert out.dtype is torch.float32
            assert found == [peak, 4]
            del out


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_values_and_gradients_are_those_of_float32(name):
    x = torch.randn(64, 32, device="vgpu:0").half().requires_grad_()
    wide = x.detach().float().requires_grad_()
    for inputs in (x, wide):
        out = in_float32(name, inputs)
        out.square().sum().backward()
        assert torch.equal(out, in_float32(name, wide))
    assert x.grad.dtype is torch.float16
    assert torch.equal(x.grad, wide.grad.half())


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_backward_makes_no_copy_either(name):
    x = torch.randn(1024, 1024, device="vgpu:0").half().requires_grad_()
    out = in_float32(name, x)
    grad = torch.ones_like(out)
    with bytes_of() as found:
        out.backward(grad)
    assert found == [2, 2]


def test_other_types_are_converted_as_ever():
    x = torch.randn(4, 8, device="vgpu:0")
    assert x.half().softmax(0).dtype is torch.float16
    assert x.half().softmax(0, dtype=torch.float64).dtype is torch.float64
    assert torch.equal(x.softmax(0, dtype=torch.float64), x.double().softmax(0))
    assert torch.equal(
        torch.special.softmax(x.half(), 0, dtype=torch.float32), x.half().float().softmax(0)
    )
    with pytest.raises(RuntimeError, match="conversion is supported for Half type only"):
        torch.ops.aten._softmax(x, 0, True)


def test_the_operator_is_one_kernel_in_a_recording():
    x = torch.randn(64, 64, device="vgpu:0").half()
    with vgpu.record() as timeline:
        in_float32("softmax", x)
    assert [event.name for event in timeline.events] == ["_softmax"]


@pytest.mark.parametrize("shapes", [False, True], ids=["values", "shapes"])
def test_logsigmoid_keeps_its_input_and_no_buffer(shapes):
    """log_sigmoid_forward_cuda in aten/src/ATen/native/cuda/Activation.cpp: ``empty({0})``."""
    with vgpu.shapes_only() if shapes else contextlib.nullcontext():
        x = torch.randn(1024, 1024, device="vgpu:0").requires_grad_()
        with bytes_of() as found:
            out = F.logsigmoid(x)
        assert found == [4, 4]
        grad = torch.ones_like(out)
        with bytes_of() as found:
            out.backward(grad)
        assert found[1] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logsigmoid_has_the_cpus_values_and_gradients(dtype):
    values, results = torch.randn(17, 5, dtype=dtype), []
    for device in ("cpu", "vgpu:1"):
        x = values.clone().to(device).requires_grad_()
        out = F.logsigmoid(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append([one.detach().cpu() for one in (out, grad, x.grad)])
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


def test_devices_are_compared_in_backward_too():
    x, grad = (torch.randn(4, device=f"vgpu:{number}") for number in (0, 1))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ops.aten.log_sigmoid_backward(grad, x, x.new_empty(0))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ops.aten.log_sigmoid_backward(grad, x.cpu(), x.new_empty(0))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ops.aten._softmax_backward_data(grad, x, 0, torch.float16)


def test_logsigmoid_writes_where_it_is_asked_to():
    x = torch.randn(4, device="vgpu:0")
    out = torch.empty_like(x)
    torch._C._nn.log_sigmoid(x, out=out)
    assert torch.equal(out, F.logsigmoid(x))
    aten, grad = torch.ops.aten, torch.ones_like(x)
    aten.log_sigmoid_backward.grad_input(grad, x, x.new_empty(0), grad_input=out)
    assert torch.equal(out, aten.log_sigmoid_backward(grad, x, x.new_empty(0)))
