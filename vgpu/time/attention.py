"""The speed of fused attention, from published measurements of its kernels.

These kernels reach a different share of a GPU's peak than matmuls, so they have their own figures.
The longer the sequence, the closer a kernel gets to its top speed, because the start and end of
each tile, and tiles that the mask cuts in half, matter less. ``best / (1 + tokens / length)``
matches the bars in the FlashAttention-2 paper to within 4%. On long sequences, a causal mask
halves the time: a kernel reaches the same FLOP/s with and without the mask, for half the FLOPs.

FLOPs are counted as in the papers: two matmuls in the forward pass and five in the backward pass,
or half as many FLOPs with a causal mask.

Not modeled: too few heads and sequences to fill the GPU (the figures are for 16k tokens in total),
dropout, and heads wider than 128, which are assumed to be as fast as heads of width 128.
"""

from typing import NamedTuple

from vgpu.hardware import GPUSpec


class Attention(NamedTuple):
    """The properties of a call to fused attention that determine its speed."""

    head_width: int
    length: int  # the number of keys per sequence
    causal: bool
    backward: bool


class _Speed(NamedTuple):
    """One kernel's TFLOP/s, with or without a causal mask, forward and backward together."""

    narrow: float  # for a head width of 64, in the limit of long sequences
    wide: float  # for a head width of 128, in the same limit
    tokens: float  # the sequence length at which the kernel reaches half of these speeds
    forward: float = 1.0  # the forward pass's own speed, as a multiple of these


class _Measured(NamedTuple):
    peak: float  # the GPU's peak, in TFLOP/s
    full: _Speed
    causal: _Speed


# Dao, 2023, FlashAttention-2, figures 4 and 7: FlashAttention 1 and 2 on an A100 80 GB SXM4 and an
# H100 80 GB SXM5, and the Triton version on the A100, for 512 to 16k tokens. (The bars are also in
# Dao-AILab/flash-attention, assets/flash2_{a100,h100}_fwd_bwd_benchmark.png.) According to section
# 4.1 of the paper, version 2 is 1.3 to 1.5 times as fast as Triton in the forward pass, and about
# twice as fast in the backward pass. Triton's row for the H100, which nobody measured, and Triton's
# ratio of forward to backward speed are derived from that. Shah et al., 2024, FlashAttention-3:
# figure 5 for the forward pass; the backward pass is 1.5 to 1.75 times as fast as version 2's.
# cuDNN 9's speed is within 15% of version 3's.
_FLASH_2_A100 = _Measured(312, _Speed(178, 204, 182), _Speed(174, 193, 505))
KERNELS: dict[str, dict[int, _Measured]] = {
    "flash 1": {
        8: _Measured(312, _Speed(111, 83, 80), _Speed(99, 84, 430)),
        9: _Measured(989, _Speed(168, 139, 50), _Speed(158, 139, 380)),
    },
    "triton": {
        8: _Measured(312, _Speed(101, 96, 80, 1.5), _Speed(81, 81, 250, 1.7)),
        9: _Measured(989, _Speed(164, 186, 110, 1.3), _Speed(159, 184, 310, 1.3)),
    },
    "flash 2": {
        8: _FLASH_2_A100,
        9: _Measured(989, _Speed(300, 340, 195), _Speed(290, 335, 525)),
    },
    "flash 3": {
        8: _FLASH_2_A100,  # version 3 is only for the H100; an A100 runs version 2
        9: _Measured(989, _Speed(468, 552, 220, 1.1), _Speed(468, 549, 580, 1.1)),
    },
}
"""Each kernel's speeds, by the major version of the GPU's compute capability."""


def attention_flop_per_s(kernel: str, spec: GPUSpec, attention: Attention) -> float:
    """Return the FLOP/s of a fused attention kernel, one of ``KERNELS``, in a 16-bit type.

    Other GPUs are assumed to reach the same share of their peak as the nearest one in ``KERNELS``.
    """
    measured = KERNELS[kernel][8 if spec.compute_capability < (9, 0) else 9]
    speed = measured.causal if attention.causal else measured.full
    wide = min(max((attention.head_width - 64) / 64, 0.0), 1.0)
    both = speed.narrow + wide * (speed.wide - speed.narrow)
    both /= 1 + speed.tokens / attention.length
    forward = both * speed.forward
    # The backward pass has 2.5 times as many FLOPs as the forward pass.
    reached = 2.5 / (3.5 / both - 1 / forward) if attention.backward else forward
    return spec.tensor_flop_per_s * reached / measured.peak
