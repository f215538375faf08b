"""Products with a wider result, and ``F.linear_cross_entropy``, which takes them on a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgpu

pytestmark = pytest.mark.virtual_gpus(1, gpu="A100")

HALF = [torch.float16, torch.bfloat16]
GPU = "vgpu:0"


@pytest.mark.parametrize("dtype", HALF)
def test_the_products_are_those_in_float32(dtype):
    a, b = (torch.randn(2, *size, device=GPU).to(dtype) for size in ((3, 4), (4, 5)))
    c, wide = torch.randn(2, 3, 5, device=GPU), torch.float32
    x, y, z = (one.cpu().float() for one in (a, b, c))
    out = torch.empty(3, 5, device=GPU)
    assert torch.mm(a[0], b[0], out_dtype=wide, out=out) is out
    for found, expected in (
        (out, x[0] @ y[0]),
        (torch.mm(a[0], b[0], out_dtype=wide), x[0] @ y[0]),
        (torch.bmm(a, b, out_dtype=wide), x @ y),
        (torch.addmm(c[0], a[0], b[0], out_dtype=wide, beta=2), 2 * z[0] + x[0] @ y[0]),
        (torch.baddbmm(c, a, b, out_dtype=wide, alpha=3), z + 3 * (x @ y)),
    ):
        assert found.dtype is wide
        torch.testing.assert_close(found.cpu(), expected)


def test_what_cublas_does_not_have_is_refused():
    a = torch.ones(2, 2, device=GPU)
    with pytest.raises(RuntimeError, match="out_dtype must be the same as input dtype or fp32"):
        torch.mm(a, a, out_dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"Expected out tensor.*size \[2, 2\].*\[3, 2\]"):
        torch.mm(a.half(), a.half(), out_dtype=torch.float32, out=torch.empty(3, 2, device=GPU))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.mm(a.half(), torch.ones(2, 2).half(), out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("gpu", "dtype", "sums_in"),
    [
        ("A100", torch.float16, torch.float32),
        ("A100", torch.bfloat16, torch.float32),
        ("V100", torch.float16, torch.float32),
        ("V100", torch.bfloat16, torch.bfloat16),
        ("K80", torch.float16, torch.float16),
    ],
)
def test_cross_entropy_of_a_linear_layer_sums_in_float32_where_the_gpu_can(gpu, dtype, sums_in):
    """_resolve_auto_acc_dtype in torch/nn/modules/linear_cross_entropy_options.py."""
    with vgpu.enable(1, gpu=gpu):
        found = nn.LinearCrossEntropyOptions()._adjust(64, 8, 500, dtype, torch.device(GPU))
    assert found.acc_dtype is sums_in and found.acc_policy == "compact"


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", HALF)
def test_cross_entropy_of_a_linear_layer_takes_cudas_way(dtype, reduction):
    torch.manual_seed(0)
    x, w = torch.randn(64, 32).to(dtype), (torch.randn(500, 32) * 0.1).to(dtype)
    target = torch.randint(500, (64,))

    def found(device, dtype=dtype, options=None):
        mine = [one.to(device, dtype).requires_grad_() for one in (x, w)]
        before = torch.vgpu.memory_allocated()
        torch.vgpu.reset_peak_memory_stats()
        with vgpu.record() as timeline:
            loss = F.linear_cross_entropy(
                *mine, target.to(device), reduction=reduction, options=options
            )
            loss.sum().backward()
        peak = torch.vgpu.max_memory_allocated() - before
        return [loss.detach(), *(one.grad for one in mine)], peak, timeline

    options = nn.LinearCrossEntropyOptions()
    exact, _, _ = found("cpu", torch.float64)
    values, peak, timeline = found(GPU, options=options)
    for mine, expected in zip(values, exact, strict=True):
        error = (mine.cpu().double() - expected).norm() / expected.norm()
        assert error < (1e-3 if dtype is torch.float16 else 0.03)
    products = 4 if reduction == "none" else 3  # backward computes the scores once more
    assert timeline.flop == products * 2 * 64 * 500 * 32
    with vgpu.shapes_only():
        _, peak_of_shapes, of_shapes = found(GPU, options=options)
    assert peak_of_shapes == peak
    assert (of_shapes.flop, of_shapes.makespan_s) == (timeline.flop, timeline.makespan_s)
