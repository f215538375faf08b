"""flash_attn's functions if it isn't installed: plain attention, in the package's layouts."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

import vgpu
from teaching.lessons import ROOT
from vgpu.torch_patches import attention as flash_attn

pytestmark = pytest.mark.virtual_gpus(1, gpu="H100")


def tensors(queries=8, keys=8, heads=4):
    torch.manual_seed(0)
    sizes = (queries, 4), (keys, heads), (keys, heads)
    return [torch.rand(2, n, h, 16, device="vgpu", dtype=torch.bfloat16) for n, h in sizes]


def formula(q, k, v, sees):
    """Compute attention by its formula in float32; ``sees`` says which keys a query attends to."""
    q, k, v = (part.float().transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.size(1) // k.size(1), 1) for part in (k, v))
    scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~sees.to(q.device), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).bfloat16()


@pytest.mark.parametrize(
    ("options", "queries", "sees"),
    [
        ({}, 8, lambda i, j: j > -1),
        ({"causal": True}, 8, lambda i, j: j <= i),
        ({"causal": True}, 3, lambda i, j: j <= i + 5),
        ({"window_size": (2, 1)}, 8, lambda i, j: (j >= i - 2) & (j <= i + 1)),
        ({"causal": True, "window_size": (2, -1)}, 8, lambda i, j: (j >= i - 2) & (j <= i)),
    ],
)
@pytest.mark.parametrize("heads", [4, 2])
def test_flash_attn_func_attends_to_the_right_keys(options, queries, sees, heads):
    q, k, v = tensors(queries, heads=heads)
    seen = sees(torch.arange(queries)[:, None], torch.arange(8)[None])
    out = flash_attn.flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(out, formula(q, k, v, seen), atol=1e-2, rtol=1e-2)


def test_packed_and_varlen_functions_have_the_same_results():
    q, k, v = tensors()
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    kv = torch.stack([k, v], 2)
    packed = torch.stack([q, k, v], 2)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), expected)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(packed, causal=True), expected)
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device="vgpu")
    flat = [part.flatten(0, 1) for part in (q, k, v)]
    out = flash_attn.flash_attn_varlen_func(*flat, bounds, bounds, 8, 8, causal=True)
    assert torch.equal(out, expected.flatten(0, 1))


def test_flash_attn_func_takes_as_long_as_one_fused_kernel_per_pass():
    q, k, v = (part.requires_grad_() for part in tensors())
    with vgpu.record() as timeline:
        flash_attn.flash_attn_func(q, k, v, causal=True).backward(torch.ones_like(q))
    names = [event.name for event in timeline.events if "attention" in event.name]
    assert names == [
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
    ]


def test_flash_attn_func_rejects_unsupported_arguments():
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match=r"only support fp16 and bf16 .* q is torch\.float32"):
        flash_attn.flash_attn_func(q.float(), k.float(), v.float())
    with pytest.raises(NotImplementedError, match=r"flash_attn with softcap=5\.0 is not supp"):
        flash_attn.flash_attn_func(q, k, v, softcap=5.0)
    assert torch.equal(
        flash_attn.flash_attn_func(q, k, v, deterministic=True),
        F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v))).transpose(1, 2),
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary_emb_rotates_pairs_of_elements_by_position(interleaved):
    x = torch.rand(2, 6, 4, 16, device="vgpu")
    angles = torch.arange(8.0, device="vgpu")[:, None] * torch.rand(5, device="vgpu")
    cos, sin = angles.cos(), angles.sin()
    out = flash_attn.apply_rotary_emb(x, cos, sin, interleaved=interleaved)
    first = slice(0, 10, 2) if interleaved else slice(0, 5)
    second = slice(1, 10, 2) if interleaved else slice(5, 10)
    turned = torch.complex(x[..., first].cpu(), x[..., second].cpu())
    turned = turned * torch.polar(torch.tensor(1.0), angles[:6, None].cpu())
    torch.testing.assert_close(out[..., first].cpu(), turned.real)
    torch.testing.assert_close(out[..., second].cpu(), turned.imag)
    assert torch.equal(out[..., 10:], x[..., 10:])
    with pytest.raises(NotImplementedError, match=r"flash_attn with inplace=True is not supp"):
        flash_attn.apply_rotary_emb(x, cos, sin, inplace=True)


@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_layer_norm_fn_normalizes_the_sum_of_input_and_residual(is_rms_norm):
    x = torch.rand(3, 8, 16, device="vgpu", dtype=torch.bfloat16)
    residual = torch.rand(3, 8, 16, device="vgpu")
    weight = torch.rand(16, device="vgpu")
    out, total = flash_attn.layer_norm_fn(
        x, weight, None, residual, prenorm=True, is_rms_norm=is_rms_norm
    )
    assert torch.equal(total, x + residual) and out.dtype == torch.bfloat16
    centered = total if is_rms_norm else total - total.mean(-1, keepdim=True)
    expected = centered * (centered.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    torch.testing.assert_close(out, expected.bfloat16())
    plain, total = flash_attn.layer_norm_fn(
        x, weight, None, prenorm=True, residual_in_fp32=True, is_rms_norm=is_rms_norm
    )
    assert plain.dtype == torch.bfloat16 and torch.equal(total, x.float())


def test_varlen_attn_is_rejected_with_a_clear_message():
    flat = [part.flatten(0, 1) for part in tensors()]
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device="vgpu")
    with pytest.raises(NotImplementedError, match=r"variable-length attention"):
        varlen_attn(*flat, bounds, bounds, 8, 8)


SCRIPT = """
import torch
from torch import nn
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func

class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return flash_attn_func(q, k, v, causal=True)

torch.manual_seed(0)
model = Attend().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
forward = torch.compile(model, mode="max-autotune")
for step in range(2):
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        loss = forward(torch.rand(2, 4, 16, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
print(torch.cuda.max_memory_allocated() > 0)
"""


def test_a_cuda_program_prints_the_same_losses_with_and_without_torch_compile(tmp_path):
    script = tmp_path / "train.py"
    command = [sys.executable, "-m", "vgpu", "--count", "1", "--gpu", "H100", "--cuda-is-vgpu"]
    printed = []
    for source in (SCRIPT, SCRIPT.replace('torch.compile(model, mode="max-autotune")', "model")):
        script.write_text(source)
        done = subprocess.run([*command, script], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        *losses, last = done.stdout.splitlines()
        assert last == "True"
        printed.append((losses, "torch.compile on virtual GPUs: " in done.stderr))
    (compiled, said), (plain, said_of_plain) = printed
    assert compiled == plain and len(plain) == 2
    assert said and not said_of_plain
