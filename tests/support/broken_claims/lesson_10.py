"""Lesson 10: why schedules get faster when copies overlap with computation."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "D11",
        "copies stay in both GPUs' queues",
        cell="beside",
        old="        with leaving, coming:\n            copy = tensor.to(gpu, non_blocking=True)",
        new="        copy = tensor.to(gpu, non_blocking=True)",
    ),
    Broken(
        "D11",
        "nothing waits for a copy",
        cell="beside",
        old="        stream.wait_event(arrived)\n",
        new="",
    ),
]
