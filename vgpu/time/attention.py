"""How fast fused attention is, from what its kernels were measured at.

They reach another share of a GPU's peak than matrix products do, so they have figures of their own. The
longer the sequence, the nearer a kernel comes to its best: what a tile begins and ends with, and tiles
that a mask cuts in half, weigh less. ``best / (1 + tokens / length)`` meets the bars that were published
of FlashAttention-2 within 4 %. A causal mask does halve the work: over long sequences a kernel reaches
as many FLOP/s with one, of half the FLOPs, as without.

FLOPs are counted as in those figures: two products forward and five backward, half of that with a
causal mask.

Left out: too few heads and sequences to fill the GPU (the figures are of 16k tokens in all), dropout,
and heads wider than 128, which are taken to be as fast as those.
"""

from typing import NamedTuple

from vgpu.hardware import GPUSpec


class Attention(NamedTuple):
    """What decides how fast a fused attention kernel is."""

    head_width: int
    length: int  # tokens of the keys
    causal: bool
    backward: bool


class _Speed(NamedTuple):
    """Of one kernel, with or without a causal mask: TFLOP/s forward and backward together."""

    narrow: float  # with heads of 64, over endless sequences
    wide: float  # with heads of 128
    tokens: float  # the length at which it reaches half of that
    forward: float = 1.0  # how many times as fast forward alone is


class _Measured(NamedTuple):
    peak: float  # of the GPU, TFLOP/s
    full: _Speed
    causal: _Speed


# Dao, 2023, FlashAttention-2, figures 4 and 7, of an A100 80 GB SXM4 and an H100 80 GB SXM5, 512 to 16k
# tokens: FlashAttention 1 and 2, and on the A100 that in Triton. (The bars are also in Dao-AILab/
# flash-attention, assets/flash2_a100_fwd_bwd_benchmark.png and _h100_.) Section 4.1 there: version 2 is
# 1.3 to 1.5 times as fast as Triton's forward, and about twice backward; that is what the H100's row of
# Triton comes from, which nobody measured, and how forward and backward differ. Shah et al., 2024,
# FlashAttention-3, figure 5 (forward), and 1.5 to 1.75 times version 2 backward. cuDNN 9 is as fast to
# within 15 %.
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
        8: _FLASH_2_A100,  # made for the H100: an A100 runs version 2
        9: _Measured(989, _Speed(468, 552, 220, 1.1), _Speed(468, 549, 580, 1.1)),
    },
}
"""By compute capability, its first number."""


def attention_flop_per_s(kernel: str, spec: GPUSpec, attention: Attention) -> float:
    """FLOP/s of a fused attention kernel, one of ``KERNELS``, in 16 bits.

    Other GPUs are taken to reach the share of their peak that the next one of these reaches.
    """
    measured = KERNELS[kernel][8 if spec.compute_capability < (9, 0) else 9]
    speed = measured.causal if attention.causal else measured.full
    wide = min(max((attention.head_width - 64) / 64, 0.0), 1.0)
    both = speed.narrow + wide * (speed.wide - speed.narrow)
    both /= 1 + speed.tokens / attention.length
    forward = both * speed.forward
    # Of 3.5 parts of the FLOPs, one is forward.
    reached = 2.5 / (3.5 / both - 1 / forward) if attention.backward else forward
    return spec.tensor_flop_per_s * reached / measured.peak
