"""Whether a prediction would choose as a measurement does, and how far off it is."""

import itertools
from collections.abc import Sequence


def order(published: Sequence[float], predicted: Sequence[float]) -> str:
    """How many pairs of rows the prediction puts in their order; equal rows have none."""
    pairs = list(itertools.combinations(zip(published, predicted, strict=True), 2))
    differing = [(one, other) for one, other in pairs if one[0] != other[0]]
    right = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in differing)
    return f"{right} of {len(differing)} pairs of rows are predicted in their published order."


def ordered_share(
    published: Sequence[float], predicted: Sequence[float], least: float = 0.03
) -> tuple[float, int]:
    """The share of pairs in their order, and how many differ by ``least`` or more."""
    pairs = itertools.combinations(zip(published, predicted, strict=True), 2)
    differing = [(one, other) for one, other in pairs if abs(one[0] / other[0] - 1) >= least]
    right = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in differing)
    return right / len(differing), len(differing)


def mean(errors: Sequence[float]) -> float:
    """Of absolute errors."""
    return sum(map(abs, errors)) / len(errors)
