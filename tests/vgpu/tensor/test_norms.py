"""Layer and batch norm of half types: statistics in float32, as CUDA's kernels keep them."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgpu

pytestmark = pytest.mark.virtual_gpus(2, gpu="A100")

aten = torch.ops.aten
HALF = [torch.float16, torch.bfloat16]


def layer_norm(x, weight, *running):
    return aten.native_layer_norm(x, [6], weight, weight, 1e-5)


def in_training(x, weight, *running):
    return aten.native_batch_norm(x, weight, weight, *running, True, 0.1, 1e-5)


def in_evaluation(x, weight, *running):
    return aten.native_batch_norm(x, weight, weight, *running, False, 0.1, 1e-5)


@pytest.mark.parametrize("block", [nullcontext, vgpu.shapes_only], ids=["values", "shapes"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("norm", [layer_norm, in_training, in_evaluation])
def test_statistics_are_float32_and_the_output_has_the_inputs_type(norm, dtype, block):
    """_refs.native_layer_norm and _decomp's native_batch_norm say so of all devices but the CPU."""
    with block():
        x = torch.randn(4, 6, device="vgpu:0", dtype=dtype)
        weight, mean, var = (torch.ones(6, device="vgpu:0", dtype=dtype) for _ in range(3))
        output, *statistics = norm(x, weight, mean, var)
    rows = (4, 1) if norm is layer_norm else (6,)
    assert output.dtype is dtype
    assert [(one.dtype, one.shape) for one in statistics] == [(torch.float32, rows)] * 2


@pytest.mark.parametrize("block", [nullcontext, vgpu.shapes_only], ids=["values", "shapes"])
@pytest.mark.parametrize("dtype", HALF)
def test_batch_norm_of_mixed_types_fails_in_backward_as_on_cuda(dtype, block):
    """``batch_norm_backward_cuda``: weights of the input's type, and statistics of another."""
    with block():
        norm = nn.BatchNorm2d(6, device="vgpu:0")
        x = torch.randn(4, 6, 3, 3, device="vgpu:0", dtype=dtype, requires_grad=True)
        norm(x).sum().backward()  # all of float32
        for parameter in norm.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None
        output = norm(x)
        with pytest.raises(RuntimeError, match=r"Expected running_mean to have type \w+ but got"):
            output.sum().backward()
        norm(x.to(memory_format=torch.channels_last)).sum().backward()  # another kernel
        norm.to(dtype)(x).sum().backward()  # all of one type


def test_group_norm_keeps_the_inputs_type():
    """CUDA's, too: param_scalar_type in ATen/native/group_norm.cpp, the same code for both."""
    x = torch.randn(2, 6, 4, device="vgpu:0", dtype=torch.float16)
    _, mean, rstd = aten.native_group_norm(x, None, None, 2, 6, 4, 3, 1e-5)
    assert mean.dtype is rstd.dtype is torch.float16


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(64),
        nn.BatchNorm1d(64),
        nn.BatchNorm1d(64).eval(),
        nn.BatchNorm1d(64, affine=False, track_running_stats=False),
    ],
    ids=["layer", "batch", "evaluated", "neither weight nor running statistics"],
)
def test_values_and_gradients_are_those_in_float32_rounded_once(module, dtype):
    torch.manual_seed(0)
    x, grad = (torch.randn(32, 64) + 4).to(dtype), torch.randn(32, 64).to(dtype)

    def found(device, dtype):
        mine = copy.deepcopy(module).to(device, dtype)
        inputs = x.to(device, dtype).requires_grad_()
        output = mine(inputs)
        output.backward(grad.to(device, dtype))
        state = [*mine.buffers(), *(p.grad for p in mine.parameters())]
        return [tensor.cpu() for tensor in (output.detach(), inputs.grad, *state)]

    for mine, exact in zip(found("vgpu:0", dtype), found("cpu", torch.float32), strict=True):
        assert mine.dtype is (exact.to(dtype).dtype if exact.is_floating_point() else exact.dtype)
        assert torch.equal(mine, exact.to(mine.dtype))


@pytest.mark.parametrize("block", [nullcontext, vgpu.shapes_only], ids=["values", "shapes"])
def test_a_layer_norms_weight_of_another_type_is_refused(block):
    with block():
        x = torch.randn(3, 4, device="vgpu:0", dtype=torch.float16)
        weight = torch.ones(4, device="vgpu:0")
        with pytest.raises(RuntimeError, match="expected scalar type Half but found Float"):
            F.layer_norm(x, (4,), weight)
        assert F.layer_norm(x[:0], (4,), weight).shape == (0, 4)


def test_operands_on_two_devices_are_refused():
    x = torch.randn(3, 4, device="vgpu:0", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        F.layer_norm(x, (4,), torch.ones(4, device="vgpu:1", dtype=torch.float16))


def test_synced_statistics_are_float32():
    """torch.nn.modules._functions sends them to the other ranks as they are."""
    x = torch.full((70000, 1), 3.0, device="vgpu:0", dtype=torch.float16)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    assert mean.dtype is invstd.dtype is torch.float32 and mean.item() == 3
    running = torch.zeros(1, device="vgpu:0", dtype=torch.float16)
    counts = torch.full((1,), 70000.0, device="vgpu:0")  # float16 ends at 65504
    whole, _ = torch.batch_norm_gather_stats_with_counts(
        x, mean[None], invstd[None], running, running.clone(), 0.5, 1e-5, counts
    )
    assert whole.item() == 3 and running.item() == 1.5
    weight = torch.ones_like(running)
    assert torch.batch_norm_elemt(x, weight, weight, mean, invstd, 1e-5).dtype is torch.float16
    sums = torch.batch_norm_backward_reduce(x, x, mean, invstd, weight, True, True, True)
    assert [one.dtype for one in sums] == [torch.float32] * 2 + [torch.float16] * 2
