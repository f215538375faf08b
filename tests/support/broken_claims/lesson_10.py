"""Lesson 10: why copies that overlap with computation make schedules faster."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "D11",
        "copies stay in the queues of both GPUs",
        cell="beside",
        old="        with leaving, coming:\n            copy = tensor.to(gpu, non_blocking=True)",
        new="        copy = tensor.to(gpu, non_blocking=True)",
    ),
    Broken(
        "D11",
        "nobody waits for a copy",
        cell="beside",
        old="        stream.wait_event(arrived)\n",
        new="",
    ),
]
