"""RMSNorm as one kernel: the CPU's values and gradients, and what CUDA keeps for backward."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import vgpu

pytestmark = pytest.mark.virtual_gpus(2, gpu="A100")

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def normalized(device, dtype, shape, normalized_shape, weighted=True):
    """The output, and the gradients of the input and of the weight, on the CPU."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(normalized_shape, elementwise_affine=weighted).to(dtype)
    x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
    if weighted:
        nn.init.uniform_(norm.weight)
    norm, x = norm.to(device), x.to(device).requires_grad_()
    output = norm(x)
    output.backward(grad.to(device))
    return [each.cpu() for each in (output.detach(), x.grad, *(p.grad for p in norm.parameters()))]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("shape", "normalized_shape"),
    [((4, 6, 16), (16,)), ((3, 4, 8), (4, 8)), ((16,), (16,)), ((0, 16), (16,))],
)
def test_values_and_gradients_are_the_cpus(dtype, weighted, shape, normalized_shape):
    given = dtype, shape, normalized_shape, weighted
    on_gpu, expected = (normalized(device, *given) for device in ("vgpu:1", "cpu"))
    assert torch.equal(on_gpu[0], expected[0])
    torch.testing.assert_close(on_gpu[1:], expected[1:])


def test_gradients_have_gradients():
    norm = nn.RMSNorm(8, dtype=torch.float64).to("vgpu:1")
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: norm(x.to("vgpu:1")).cpu(), x)
    assert torch.autograd.gradgradcheck(lambda x: norm(x.to("vgpu:1")).cpu(), x)


def step(norm, rows):
    """The names of the kernels of a step, and the bytes that forward keeps and backward needs."""
    x = torch.randn(rows, 1024, device="vgpu:1", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones_like(x)
    before = torch.vgpu.memory_allocated(1)
    with vgpu.record() as timeline:
        y = norm(x)
        kept = torch.vgpu.memory_allocated(1) - before
        torch.vgpu.reset_peak_memory_stats(1)
        y.backward(grad)
    return [e.name for e in timeline.events], kept, torch.vgpu.max_memory_allocated(1) - before


@pytest.mark.parametrize("values", [nullcontext, vgpu.shapes_only])
def test_one_kernel_each_way_keeps_the_output_and_a_number_a_row(values):
    rows = 1024
    with values():
        norm = nn.RMSNorm(1024).to("vgpu:1", torch.bfloat16)
        kernels, kept, peak = step(norm, rows)
    assert kernels == ["_fused_rms_norm", "_fused_rms_norm_backward"]
    assert kept == rows * 1024 * 2 + rows * 4
    assert peak == kept + rows * 1024 * 2 + 1024 * 2  # the gradients of the input and the weight


def test_without_autograd_it_is_one_kernel_too():
    norm = nn.RMSNorm(64).to("vgpu:1")
    x = torch.randn(8, 64, device="vgpu:1")
    for without in (torch.no_grad, torch.inference_mode):
        with without(), vgpu.record() as timeline:
            norm(x)
        assert [e.name for e in timeline.events] == ["_fused_rms_norm"]
