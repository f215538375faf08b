"""Checks for lesson 00."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from helpers.checks.core import Wrong, exercise, expect_equal, for_input


@exercise("0.1", "The largest share")
def largest_share(answer: Callable[[int, int], int]) -> dict[str, Any]:
    even = random.randint(2, 9)
    _expect_share(
        answer,
        even * 8,
        8,
        hint="This batch divides evenly: every GPU gets batch_size / gpu_count images.",
    )
    uneven = (even * 8 + random.randint(1, 7), 8)
    drawn = [(random.randint(1, 100), random.randint(1, 8)) for _ in range(20)]
    for batch_size, gpu_count in [uneven, *drawn]:
        hint = "No image may be left over: shares are rounded up unless the batch divides evenly."
        _expect_share(answer, batch_size, gpu_count, hint)
    yours = answer(even * 8, 8)
    if not isinstance(yours, int):
        hint = "The value is right, but return an int, since it counts images."
        raise Wrong(yours=yours, expected=even, given=f"a batch of {even * 8} on 8 GPUs", hint=hint)
    return {
        "your largest share": f"{answer(100, 8)} of 100 images on 8 GPUs",
        "tried": f"{2 + len(drawn)} batches",
    }


def _expect_share(
    answer: Callable[[int, int], int], batch_size: int, gpu_count: int, hint: str
) -> None:
    with for_input(f"a batch of {batch_size} on {gpu_count} GPUs"):
        share = answer(batch_size, gpu_count)
        if share is None:
            hint = "A function without a return statement returns None: return the number."
        elif isinstance(share, str):
            hint = "This is a string: return the number itself."
        elif isinstance(share, torch.Tensor):
            hint = "This is a tensor: return an int, since it counts images."
        expect_equal(share, math.ceil(batch_size / gpu_count), hint=hint)
