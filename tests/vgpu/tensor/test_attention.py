"""Fused attention: the CPU's values and gradients, without a score matrix."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import vgpu

pytestmark = pytest.mark.virtual_gpus(2, gpu="A100")

HEADS, LENGTH, WIDTH = 4, 64, 16


def attended(device, dtype, mask=None, **options):
    """Return the output, the gradients, and the bytes that forward keeps on vgpu:1."""
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
def test_values_and_gradients_match_the_cpus_and_no_scores_are_kept(dtype, mask, options):
    if mask is torch.float32:
        mask = dtype
    made = None if mask is None else some_mask(mask).to(mask)
    expected, _ = attended("cpu", dtype, made, **options)
    found, kept = attended("vgpu:1", dtype, made, **options)
    for mine, other in zip(found, expected, strict=True):
        if options.get("enable_gqa"):  # multiple heads' gradients are added in a different order
            tolerance = 1e-5 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(mine, other)
    scores = 2 * HEADS * LENGTH * LENGTH * torch.empty((), dtype=dtype).element_size()
    assert kept < scores, "the score matrix must be larger than everything kept"


def test_dropout_is_computed_unfused_and_the_operator_rejects_it():
    parts = [torch.randn(2, 4, 8, 16, device="vgpu:0") for _ in range(3)]
    torch.manual_seed(3)
    one = F.scaled_dot_product_attention(*parts, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(one.cpu(), F.scaled_dot_product_attention(*parts, dropout_p=0.5).cpu())
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.5 is not supported"):
        torch.ops.aten._scaled_dot_product_flash_attention(*parts, 0.5)


SCORES_BYTES = 2 * HEADS * LENGTH * LENGTH  # at least one byte each
MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
EFFICIENT, CUDNN = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION


@pytest.mark.parametrize(
    ("gpu", "dtype", "mask", "able"),
    [
        ("A100", torch.float16, False, {MATH, FLASH, EFFICIENT, CUDNN}),
        ("A100", torch.bfloat16, True, {MATH, EFFICIENT, CUDNN}),
        ("A100", torch.float32, False, {MATH, EFFICIENT}),
        ("A100", torch.float32, True, {MATH, EFFICIENT}),
        ("A100", torch.float64, False, {MATH}),
        ("V100", torch.float16, False, {MATH, EFFICIENT}),
        ("V100", torch.bfloat16, False, {MATH}),
        ("K80", torch.float32, False, {MATH}),
    ],
)
def test_attention_rejects_inputs_that_no_enabled_kernel_supports(gpu, dtype, mask, able):
    with vgpu.enable(2, gpu=gpu):
        for backend in (MATH, FLASH, EFFICIENT, CUDNN):
            with sdpa_kernel(backend):
                if backend in able:
                    _, kept = attended(
                        "vgpu:1", dtype, some_mask(dtype).to(dtype) if mask else None
                    )
                    assert (kept < SCORES_BYTES * dtype.itemsize) is (backend != MATH)
                else:
                    with pytest.raises(
                        RuntimeError, match=r"No available kernel\. Aborting execution\."
                    ):
                        attended("vgpu:1", dtype, some_mask(dtype).to(dtype) if mask else None)


def test_attention_tries_the_next_kernel_if_one_is_unsupported():
    q, k = (torch.randn(1, 2, n, 16, device="vgpu:0").half() for n in (8, 6))
    thin = torch.randn(1, 2, 8, 5, device="vgpu:0")
    for call in (
        lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        lambda: F.scaled_dot_product_attention(*[q.mT.contiguous().mT] * 3),
    ):
        with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="queries"):
            call()
        call()
    with sdpa_kernel(EFFICIENT), pytest.raises(RuntimeError, match=r"torch\.float32"):
        F.scaled_dot_product_attention(thin, thin, thin)


def test_attention_keeps_the_requested_order_of_kernels():
    with sdpa_kernel([MATH, EFFICIENT], set_priority=True):
        _, first = attended("vgpu:1", torch.float32)
    with sdpa_kernel([EFFICIENT, MATH], set_priority=True):
        _, second = attended("vgpu:1", torch.float32)
    assert second < SCORES_BYTES * 4 <= first


def test_autocast_lowers_every_dtype_but_float64():
    torch.manual_seed(0)
    parts = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    mask = torch.randn(8, 8)

    def found(device):
        on_it = [part.to(device) for part in parts]
        with torch.autocast(device, torch.bfloat16):
            return [
                F.scaled_dot_product_attention(*on_it),
                F.scaled_dot_product_attention(*on_it, attn_mask=mask.to(device)),
                F.scaled_dot_product_attention(*on_it, attn_mask=mask.to(device) > 0),
            ]

    for mine, expected in zip(found("vgpu"), found("cpu"), strict=True):
        assert mine.dtype is torch.bfloat16
        assert torch.equal(mine.cpu(), expected)
    with torch.autocast("vgpu", torch.bfloat16):
        wide = [part.to("vgpu").double() for part in parts]
        assert F.scaled_dot_product_attention(*wide).dtype is torch.float64


def test_operands_on_two_devices_are_rejected():
    parts = [torch.randn(2, 4, 8, 16, device=f"vgpu:{i % 2}") for i in range(3)]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        F.scaled_dot_product_attention(*parts)


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_biases_override_scaled_dot_product_attention(bias):
    """The result matches an explicit mask, however and whenever the function was imported."""
    vgpu.disable()
    imported_before = F.scaled_dot_product_attention
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(query, key, key, bias(3, 5)._materialize())
    vgpu.enable(1, gpu="A100")
    for attend in (F.scaled_dot_product_attention, imported_before):
        for device in ("cpu", "vgpu"):
            parts = [part.to(device) for part in (query, key, key)]
            found = attend(*parts, attn_mask=bias(3, 5))
            torch.testing.assert_close(found.cpu(), expected)
