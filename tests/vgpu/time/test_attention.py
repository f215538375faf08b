"""Fused attention is as fast as published measurements of its kernels."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

import vgpu
from vgpu.time.costs import KERNELS, attention_flop_per_s
from vgpu.time.workloads import Attention

A100, H100, B200 = (vgpu.PRESETS[name] for name in ("A100", "H100", "B200"))
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
# TFLOP/s, forward and backward: Dao, 2023, FlashAttention-2, figures 4 and 7.
BARS = {
    (A100, 64, False): (132, 153, 162, 171, 175, 176),
    (A100, 128, False): (151, 173, 187, 196, 201, 203),
    (A100, 64, True): (88, 119, 140, 156, 165, 171),
    (A100, 128, True): (99, 133, 155, 173, 182, 189),
    (H100, 64, False): (215, 254, 274, 288, 294, 296),
    (H100, 128, False): (248, 294, 320, 326, 335, 338),
    (H100, 64, True): (141, 192, 232, 257, 273, 284),
    (H100, 128, True): (163, 221, 265, 294, 308, 328),
}


def together(kernel, spec, width, length, causal):
    """Return the TFLOP/s of forward and backward; forward has 2 of the 7 matmuls."""
    forward, backward = (
        attention_flop_per_s(kernel, spec, Attention(width, length, causal, is_backward))
        for is_backward in (False, True)
    )
    return 3.5 / (1 / forward + 2.5 / backward) / 1e12


@pytest.mark.parametrize(("bars", "measured"), BARS.items(), ids=str)
def test_flash_2_matches_published_speeds(bars, measured):
    spec, width, causal = bars
    found = [together("flash 2", spec, width, length, causal) for length in LENGTHS]
    assert found == pytest.approx(measured, rel=0.04)


def test_attention_on_a_b200_matches_published_speeds():
    # MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json: TFLOP/s for 64 heads and 4,096
    # tokens, and for 16 heads and longer sequences.
    for length, measured in ((4096, 861), (32_768, 1057), (131_072, 976)):
        found = together("flash 3", B200, 128, length, causal=True)
        assert found == pytest.approx(measured, rel=0.1)


def test_triton_is_slower_than_flash_2_especially_backward():
    for backward, times in ((False, 1.4), (True, 2.0)):
        attention = Attention(128, 65_536, True, backward)
        fast, slow = (
            attention_flop_per_s(kernel, H100, attention) for kernel in ("flash 2", "triton")
        )
        assert fast / slow == pytest.approx(times, rel=0.1)


def test_an_unmeasured_gpu_reaches_the_same_share_of_its_peak_as_the_nearest_one():
    faster = dataclasses.replace(H100, tensor_flop_per_s=2 * H100.tensor_flop_per_s)
    older = dataclasses.replace(A100, compute_capability=(7, 0))
    newer = dataclasses.replace(B200, compute_capability=(12, 0))
    attention = Attention(128, 4096, True, False)
    for kernel in KERNELS:
        for unmeasured, measured, ratio in ((faster, H100, 2), (older, A100, 1), (newer, B200, 1)):
            found, of_measured = (
                attention_flop_per_s(kernel, spec, attention) for spec in (unmeasured, measured)
            )
            assert found == pytest.approx(ratio * of_measured)


def test_recorded_attention_takes_as_long_as_its_kernel():
    with vgpu.enable(1, gpu="A100"), vgpu.shapes_only():
        query, key, value = (
            torch.empty(1, 16, 16_384, 128, device="vgpu", dtype=torch.bfloat16) for _ in range(3)
        )
        with vgpu.record() as timeline:
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
    (kernel,) = [event for event in timeline.events if "attention" in event.name]
    assert kernel.flop == 2 * 16 * 16_384**2 * 128
    assert kernel.flop / (kernel.end_s - kernel.start_s) == pytest.approx(187e12, rel=0.01)
    slower = vgpu.replay(timeline, attention="flash 1")
    assert slower.makespan_s > 2 * timeline.makespan_s


def test_an_unknown_kernel_is_rejected():
    with pytest.raises(ValueError, match=r"attention must be one of flash 1, .*flash 9"):
        vgpu.CostModel(A100, attention="flash 9")
