"""Checks of lesson 00."""

import math
import random
from collections.abc import Callable

from helpers.checks.core import Wrong, exercise, expect_equal


@exercise("0.1", "The largest share")
def largest_share(answer: Callable[[int, int], int]) -> None:
    even = random.randint(2, 9)
    expect_equal(
        answer(even * 8, 8),
        even,
        given=f"a batch of {even * 8} on 8 GPUs",
        hint="This batch divides evenly: every GPU gets batch_size / gpu_count images.",
    )
    uneven = (even * 8 + random.randint(1, 7), 8)
    drawn = [(random.randint(1, 100), random.randint(1, 8)) for _ in range(20)]
    for batch_size, gpu_count in [uneven, *drawn]:
        expect_equal(
            answer(batch_size, gpu_count),
            math.ceil(batch_size / gpu_count),
            given=f"a batch of {batch_size} on {gpu_count} GPUs",
            hint="Nothing may be left over: a share is rounded up when the batch does not divide.",
        )
    yours = answer(even * 8, 8)
    if not isinstance(yours, int):
        hint = "The number is right; make it a whole number (an int), as images are."
        raise Wrong(yours=yours, expected=even, given=f"a batch of {even * 8} on 8 GPUs", hint=hint)
