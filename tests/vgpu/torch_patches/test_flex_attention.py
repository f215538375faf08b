"""``flex_attention`` on a virtual GPU: the CPU's values, and gradients that the CPU lacks."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

pytestmark = [
    pytest.mark.virtual_gpus(2, gpu="H100"),
    pytest.mark.filterwarnings("ignore:torch.compile on virtual GPUs:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def compiled(name):
    """Return flex_attention and create_block_mask, compiled unless ``name`` is "plain"."""
    if name == "plain":
        return flex_attention, create_block_mask
    attention = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", fullgraph=True)
    return attention, torch.compile(create_block_mask)


def attend(attention, make_mask, device, **options):
    """Run grouped-query attention with a learned bias and a causal document mask."""
    torch.manual_seed(0)
    query, key, value = (torch.rand(2, heads, 48, 16).to(device) for heads in (4, 2, 2))
    bias, document = torch.rand(48).to(device), (torch.arange(48) // 20).to(device)

    def score_mod(score, batch, head, i, j):
        return score + bias[i - j] * head

    def mask_mod(batch, head, i, j):
        return (i >= j) & (document[i] == document[j])

    mask = make_mask(mask_mod, 2, None, 48, 48, device=device)
    return attention(query, key, value, score_mod, mask, enable_gqa=True, **options)


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_flex_attention_matches_the_cpu(way):
    expected = attend(flex_attention, create_block_mask, "cpu")
    assert torch.equal(attend(*compiled(way), "vgpu:1").cpu(), expected)


def test_flex_attention_with_a_causal_mask_matches_plain_attentions_gradients():
    attention, make_mask = compiled("compiled")
    gradients = []
    for flex in (True, False):
        torch.manual_seed(0)
        inputs = [torch.rand(2, 4, 32, 16, device="vgpu", requires_grad=True) for _ in range(3)]
        if flex:
            mask = make_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="vgpu")
            out = attention(*inputs, block_mask=mask)
        else:
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        out.square().sum().backward()
        gradients.append([out, *(one.grad for one in inputs)])
    torch.testing.assert_close(*gradients)


def test_a_bias_of_flex_attention_gets_a_gradient():
    bias = torch.zeros(8, device="vgpu", requires_grad=True)
    parts = [torch.rand(1, 1, 8, 16, device="vgpu") for _ in range(3)]
    flex_attention(*parts, score_mod=lambda s, b, h, i, j: s + bias[j]).sum().backward()
    expected = torch.zeros(8, device="vgpu", requires_grad=True)
    F.scaled_dot_product_attention(*parts, attn_mask=expected.expand(8, 8)).sum().backward()
    torch.testing.assert_close(bias.grad, expected.grad)


def test_flex_attention_keeps_its_output_and_logsumexp_for_the_backward_pass():
    parts = [torch.rand(1, 2, 256, 16, device="vgpu", requires_grad=True) for _ in range(3)]
    before = torch.vgpu.memory_allocated()
    out = flex_attention(*parts, score_mod=lambda s, b, h, i, j: s * 2)
    rows = 2 * 256
    # The logsumexp and, since torch 2.10, the largest score of each row.
    assert torch.vgpu.memory_allocated() - before - rows * 16 * 4 in (rows * 4, 2 * rows * 4)
    out.sum().backward()


def test_flex_attention_returns_the_logsumexp():
    out, aux = attend(flex_attention, create_block_mask, "vgpu", return_aux=AuxRequest(lse=True))
    assert out.shape == (2, 4, 48, 16)
    parts = [torch.rand(1, 2, 8, 16, device="vgpu") for _ in range(3)]
    _, aux = flex_attention(*parts, scale=1.0, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(aux.lse, (parts[0] @ parts[1].mT).logsumexp(-1))


def test_flex_attention_computes_in_autocasts_dtype():
    parts = [torch.rand(1, 2, 8, 16, device="vgpu") for _ in range(3)]
    with torch.autocast("vgpu", dtype=torch.bfloat16):
        out = flex_attention(*parts)
    assert torch.equal(out, flex_attention(*(part.bfloat16() for part in parts)))


def test_a_block_mask_on_another_gpu_raises_torchs_error():
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="vgpu:1")
    parts = [torch.rand(1, 2, 8, 16, device="vgpu:0") for _ in range(3)]
    with pytest.raises(RuntimeError, match="same device but got vgpu:0 and vgpu:1"):
        flex_attention(*parts, block_mask=mask)


def test_gradients_of_flex_attention_have_the_strides_of_its_inputs():
    """Keys may have tokens before heads; context parallelism reduces gradients without a copy."""
    strides = []
    inputs = [torch.rand(1, 32, 4, 16, device="vgpu", requires_grad=True) for _ in range(3)]
    views = [one.transpose(1, 2) for one in inputs]
    for view in views:
        view.register_hook(lambda gradient: strides.append(gradient.stride()))
    flex_attention(*views).square().sum().backward()
    assert strides == [view.stride() for view in views]
