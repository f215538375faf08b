"""Half-precision operators that CUDA computes in float32, and what they keep."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import vgpu

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
def test_values_and_gradients_match_float32_rounded_once(name, dtype):
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


# Softmax of float16 with a float32 result in one kernel, and logsigmoid, which keeps only its input

MIB = 2**20


def in_float32(name, x):
    return getattr(F, name)(x, -1, dtype=torch.float32)


@contextlib.contextmanager
def bytes_of():
    """Yield a list that gets the MiB allocated at the block's peak and end, beyond those at its start."""
    torch.vgpu.reset_peak_memory_stats()
    before, found = torch.vgpu.memory_allocated(), []
    yield found
    for count in (torch.vgpu.max_memory_allocated(), torch.vgpu.memory_allocated()):
        found.append((count - before) // MIB)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shapes", [False, True], ids=["values", "shapes"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by", ["dtype", "autocast"])
def test_float16_softmax_needs_no_copy_but_bfloat16_softmax_does(name, shapes, mode, by):
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
def test_softmax_matches_float32_values_and_gradients(name):
    x = torch.randn(64, 32, device="vgpu:0").half().requires_grad_()
    wide = x.detach().float().requires_grad_()
    for inputs in (x, wide):
        out = in_float32(name, inputs)
        out.square().sum().backward()
        assert torch.equal(out, in_float32(name, wide))
    assert x.grad.dtype is torch.float16
    assert torch.equal(x.grad, wide.grad.half())


def test_float16_softmax_with_a_float32_result_is_one_kernel():
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
