"""Lesson 10: why copies that overlap with computation make schedules faster."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "D11",
        "copies stay in the queues of both GPUs",
        cell="beside",
        edits=[
            (
                "        with leaving, coming:\n            copy = tensor.to(gpu, non_blocking=True)",
                "        copy = tensor.to(gpu, non_blocking=True)",
            )
        ],
    ),
    Broken(
        "D11",
        "nobody waits for a copy",
        cell="beside",
        edits=[("        stream.wait_event(arrived)\n", "")],
    ),
]
