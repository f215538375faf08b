"""A module's step counts the same kept and peak bytes with values as in ``shapes_only()``.

The two have different sources: what torch's CPU kernels allocate, as corrected by handlers
(tensor/cuda_kernels.py), and what torch's meta kernels return.
"""

import pytest
import torch
from torch import nn

import vgpu

pytestmark = pytest.mark.virtual_gpus(1, gpu="A100")

GPU = "vgpu:0"
ROWS, CHANNELS, WORDS = (64, 128), (4, 32, 8, 8), (8, 32, 64)


class Calls(nn.Module):
    """Passes an input to a module or function ``times`` times; returns the first result."""

    def __init__(self, called, times=1, **options):
        super().__init__()
        self.called, self.times, self.options = called, times, options

    def forward(self, x):
        result = self.called(*[x] * self.times, **self.options)
        return result[0] if isinstance(result, tuple) else result


def attention(**options):
    return Calls(nn.MultiheadAttention(64, 4, batch_first=True), 3, **options)


CASES = {
    "layer norm": (lambda: nn.LayerNorm(2), (1000, 2)),  # statistics of more than one block
    "group norm": (lambda: nn.GroupNorm(8, 32), CHANNELS),
    "batch norm": (lambda: nn.BatchNorm1d(1000), (4, 1000)),
    "batch norm in evaluation mode": (lambda: nn.BatchNorm1d(1000).eval(), (4, 1000)),
    "instance norm": (lambda: nn.InstanceNorm2d(32, affine=True), (16, 32, 4, 4)),
    "rms norm": (lambda: nn.RMSNorm(2), (1000, 2)),
    "local response norm": (lambda: nn.LocalResponseNorm(2), CHANNELS),
    "linear": (lambda: nn.Linear(128, 64), ROWS),
    "convolution": (lambda: nn.Conv2d(32, 16, 3), CHANNELS),
    "transposed convolution": (lambda: nn.ConvTranspose2d(32, 16, 3), CHANNELS),
    "attention": (lambda: attention(need_weights=False), WORDS),
    "attention with weights": (attention, WORDS),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), WORDS),
    "lstm": (lambda: Calls(nn.LSTM(64, 32, batch_first=True)), WORDS),
    "gru": (lambda: Calls(nn.GRU(64, 32, batch_first=True)), WORDS),
    "max pool": (lambda: nn.MaxPool2d(2), CHANNELS),
    "average pool": (lambda: nn.AdaptiveAvgPool2d(3), CHANNELS),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), CHANNELS),
    "unfold": (lambda: nn.Unfold(3), CHANNELS),
    "unfold with strides": (lambda: nn.Unfold(2, stride=4), CHANNELS),
    "fold": (lambda: nn.Fold((8, 8), 3), (4, 288, 36)),
    "dropout": (lambda: nn.Dropout2d(0.5), CHANNELS),
    "prelu": (lambda: nn.PReLU(32), CHANNELS),
    "glu": (lambda: nn.GLU(1), CHANNELS),
    "log sigmoid": (nn.LogSigmoid, ROWS),
    "sort": (lambda: Calls(lambda x: x.sort(1)), ROWS),
    "cumprod": (lambda: Calls(lambda x: x.cumprod(1)), ROWS),
    "norm": (lambda: Calls(lambda x: x.norm()), ROWS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_shapes_count_the_same_bytes(name, dtype):
    make, size = CASES[name]

    def counted():
        module = make().to(GPU, dtype)
        x = torch.randn(size, device=GPU, dtype=dtype, requires_grad=True)
        before = torch.vgpu.memory_allocated()
        found = []
        torch.vgpu.reset_peak_memory_stats()
        y = module(x)
        found += [torch.vgpu.max_memory_allocated(), torch.vgpu.memory_allocated()]
        y.backward(torch.ones_like(y))
        found += [torch.vgpu.max_memory_allocated(), torch.vgpu.memory_allocated()]
        return [size_bytes - before for size_bytes in found], y.stride(), x.grad.stride()

    with vgpu.shapes_only():
        expected = counted()
    assert counted() == expected
