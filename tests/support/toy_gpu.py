"""A GPU whose times can be computed by hand: 1 GB/s to read, write or send; arithmetic is free.

A kilobyte takes a microsecond each way; each test chooses the cost of launches.
"""

import pytest

import vgpu

PLAIN = vgpu.Link("plain", 1e9, 0.0, "made for these tests")
KB = 250  # float32 values of 1,000 bytes


def toy_gpu(link: vgpu.Link = PLAIN) -> vgpu.GPUSpec:
    return vgpu.GPUSpec(
        name="Virtual Test",
        memory_bytes=2**40,
        memory_bandwidth_bytes_per_s=1e9,
        fp32_flop_per_s=1e30,
        tensor_flop_per_s=1e30,
        multi_processor_count=1,
        compute_capability=(1, 0),
        source="made for these tests",
        link=link,
        host_link=link,
    )


SPEC = toy_gpu()
# Every launch takes a microsecond, and kernels reach the full peaks.
LAUNCH_S = 1e-6
COSTS = vgpu.CostModel(
    SPEC,
    arithmetic_share=1.0,
    memory_share=1.0,
    link_share=1.0,
    python_launch_s=LAUNCH_S,
    engine_launch_s=LAUNCH_S,
    kernel_s=0.0,
)


def times_us(timeline: vgpu.Timeline, kind: str = "kernel") -> list[tuple[float, float]]:
    """Return the start and end of each event of a kind on vgpu:0, in launch order."""
    events = [event for event in timeline.of("vgpu:0") if event.kind == kind]
    events.sort(key=lambda event: event.launch_s)
    return [(event.start_s * 1e6, event.end_s * 1e6) for event in events]


def us(*times):
    return [pytest.approx(pair, rel=1e-9) for pair in times]


def near(seconds):
    return pytest.approx(seconds, rel=1e-9, abs=1e-15)
