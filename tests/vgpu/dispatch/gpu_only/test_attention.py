"""Fused attention: the CPU's values and gradients, without a matrix of scores."""

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.virtual_gpus(2)

HEADS, LENGTH, WIDTH = 4, 64, 16


def attended(device, dtype, mask=None, **options):
    """The output, the gradients, and the bytes that forward keeps on vgpu:1."""
    torch.manual_seed(0)
    parts = [torch.randn(2, HEADS, LENGTH, WIDTH, dtype=dtype) for _ in range(3)]
    if options.get("enable_gqa"):
        parts[1:] = [part[:, :2].contiguous() for part in parts[1:]]
    parts = [part.to(device).requires_grad_() for part in parts]
    mask = None if mask is None else mask.to(device)
    before = torch.vgpu.memory_allocated(1)
    output = F.scaled_dot_product_attention(*parts, attn_mask=mask, **options)
    kept = torch.vgpu.memory_allocated(1) - before
    output.square().sum().backward()
    return [output.detach().cpu(), *(part.grad.cpu() for part in parts)], kept


def some_mask(dtype):
    mask = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3
    mask = mask | torch.eye(LENGTH, dtype=torch.bool)
    return mask if dtype is torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -9.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (None, {"is_causal": True}),
        (None, {"scale": 0.5}),
        (torch.bool, {}),
        (torch.float32, {}),
        (None, {"enable_gqa": True}),
    ],
    ids=["plain", "causal", "scaled", "mask of bools", "mask of numbers", "grouped queries"],
)
def test_values_and_gradients_are_the_cpus_and_no_scores_are_kept(dtype, mask, options):
    if mask is torch.float32:
        mask = dtype
    made = None if mask is None else some_mask(mask).to(mask)
    expected, _ = attended("cpu", dtype, made, **options)
    found, kept = attended("vgpu:1", dtype, made, **options)
    for mine, other in zip(found, expected, strict=True):
        if options.get("enable_gqa"):  # where several heads' gradients are added, orders differ
            tolerance = 1e-5 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(mine, other)
    scores = 2 * HEADS * LENGTH * LENGTH * torch.empty((), dtype=dtype).element_size()
    assert kept < scores, "the matrix of scores is larger than all that is kept"


def test_as_many_heads_of_keys_as_of_queries_are_not_copied():
    """CUDA's own first step with enable_gqa: pre_process_group_query_attention_input in
    aten/src/ATen/native/transformers/attention.cpp hands equal numbers of heads on as they are."""
    parts = [torch.randn(2, HEADS, LENGTH, WIDTH, device="vgpu:1") for _ in range(3)]
    kept = {}
    for grouped in (False, True):
        before = torch.vgpu.memory_allocated(1)
        output = F.scaled_dot_product_attention(
            *(part.detach().requires_grad_() for part in parts), enable_gqa=grouped
        )
        kept[grouped] = torch.vgpu.memory_allocated(1) - before
        del output
    assert kept[True] == kept[False] > 0


def test_the_unfused_way_keeps_the_scores():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, kept = attended("vgpu:1", torch.float32)
    assert kept >= 2 * HEADS * LENGTH * LENGTH * 4


def test_dropout_is_computed_unfused_and_the_operator_refuses_it():
    parts = [torch.randn(2, 4, 8, 16, device="vgpu:0") for _ in range(3)]
    torch.manual_seed(3)
    one = F.scaled_dot_product_attention(*parts, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(one.cpu(), F.scaled_dot_product_attention(*parts, dropout_p=0.5).cpu())
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.5 is not supported"):
        torch.ops.aten._scaled_dot_product_flash_attention(*parts, 0.5)


def test_autocast_lowers_the_type():
    parts = [torch.randn(2, 4, 8, 16, device="vgpu:0") for _ in range(3)]
    with torch.autocast("vgpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(*parts).dtype is torch.bfloat16


def test_operands_on_two_devices_are_refused():
    parts = [torch.randn(2, 4, 8, 16, device=f"vgpu:{i % 2}") for i in range(3)]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        F.scaled_dot_product_attention(*parts)
