"""How fast fused attention is, from measurements of its kernels.

These kernels reach a different share of a GPU's peak than matmuls, so they have their own figures.
The longer the sequence, the closer a kernel gets to its best: the start and end of each tile, and
tiles that the mask cuts in half, matter less. ``best / (1 + tokens / length)`` matches
FlashAttention-2's published bars within 4 %. A causal mask does halve the time: over long
sequences, a kernel reaches the same FLOP/s with and without it, for half the FLOPs.

FLOPs are counted as in those figures: two matmuls forward and five backward, half of that with a
causal mask.

The model leaves out the case of too few heads and sequences to fill the GPU (the figures are for
16k tokens in total), dropout, and heads wider than 128, which count as fast as those of 128.
"""

from typing import NamedTuple

from vgpu.hardware import GPUSpec


class Attention(NamedTuple):
    """What determines how fast a fused attention kernel is."""

    head_width: int
    length: int  # of the keys, in tokens
    causal: bool
    backward: bool


class _Speed(NamedTuple):
    """One kernel's TFLOP/s, with or without a causal mask, forward and backward together."""

    narrow: float  # for a head width of 64, in the limit of long sequences
    wide: float  # for a head width of 128
    tokens: float  # the sequence length at which the kernel reaches half of that
    forward: float = 1.0  # how many times faster forward alone is


class _Measured(NamedTuple):
    peak: float  # the GPU's, in TFLOP/s
    full: _Speed
    causal: _Speed


# Dao, 2023, FlashAttention-2, figures 4 and 7, on an A100 80 GB SXM4 and an H100 80 GB SXM5, 512 to
# 16k tokens: FlashAttention 1 and 2 and, on the A100, the one in Triton. (The bars are also in
# Dao-AILab/flash-attention, assets/flash2_a100_fwd_bwd_benchmark.png and _h100_.) According to the
# paper's section 4.1, version 2 is 1.3 to 1.5 times as fast as Triton's forward, and about twice as
# fast backward; Triton's row for the H100, which nobody measured, and the difference between forward
# and backward come from that. Shah et al., 2024, FlashAttention-3: figure 5 (forward), and 1.5 to
# 1.75 times version 2 backward. cuDNN 9 is as fast as version 3 to within 15 %.
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
        8: _FLASH_2_A100,  # only for the H100; an A100 runs version 2
        9: _Measured(989, _Speed(468, 552, 220, 1.1), _Speed(468, 549, 580, 1.1)),
    },
}
"""The speeds of each kernel, by the major number of the compute capability."""


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
    # The forward pass has one part of the FLOPs, the backward pass 2.5.
    reached = 2.5 / (3.5 / both - 1 / forward) if attention.backward else forward
    return spec.tensor_flop_per_s * reached / measured.peak
