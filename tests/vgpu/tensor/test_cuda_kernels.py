"""Operators that only CUDA has for half types: the values of float32, rounded once."""

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.virtual_gpus(1, gpu="A100")

IMAGE, VOLUME, SCORES = (2, 3, 6, 6), (2, 3, 4, 4, 4), (4, 5)
CALLS = {
    "avg_pool3d": (VOLUME, lambda x: F.avg_pool3d(x, 2)),
    "_upsample_bilinear2d_aa": (
        IMAGE,
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    ),
    "_upsample_bicubic2d_aa": (
        IMAGE,
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True),
    ),
    "multi_margin_loss": (
        SCORES,
        lambda x: F.multi_margin_loss(x, torch.arange(4, device=x.device), weight=x[0].detach()),
    ),
    "multilabel_margin_loss": (
        SCORES,
        lambda x: F.multilabel_margin_loss(x, torch.arange(20, device=x.device).view(4, 5) % 5),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_in_float32_rounded_once(name, dtype):
    shape, call = CALLS[name]
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)

    def found(device, dtype):
        inputs = x.to(device, dtype).requires_grad_()
        output = call(inputs)
        output.backward(torch.ones_like(output))
        return output.detach().cpu(), inputs.grad.cpu()

    for mine, exact in zip(found("vgpu:0", dtype), found("cpu", torch.float32), strict=True):
        assert mine.dtype is dtype
        assert torch.equal(mine, exact.to(dtype))


def test_local_response_norm_of_bfloat16():
    """torch makes it of avg_pool3d."""
    x = torch.randn(2, 4, 5, 5, device="vgpu:0", dtype=torch.bfloat16)
    expected = F.local_response_norm(x.cpu().float(), 2)
    assert torch.allclose(F.local_response_norm(x, 2).cpu().float(), expected, atol=0.02)
