"""How well predictions rank configurations compared with measurements, and how far off they are."""

import itertools
from collections.abc import Sequence


def order(published: Sequence[float], predicted: Sequence[float]) -> str:
    """Say how many pairs of rows are predicted in the published order, not counting equal rows."""
    pairs = list(itertools.combinations(zip(published, predicted, strict=True), 2))
    differing = [(one, other) for one, other in pairs if one[0] != other[0]]
    right = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in differing)
    return f"{right} of {len(differing)} pairs of rows are predicted in their published order."


def ordered_share(
    published: Sequence[float], predicted: Sequence[float], least: float = 0.03
) -> tuple[float, int]:
    """Return the fraction of pairs in the right order, of those that differ by at least ``least``, and their number."""
    pairs = itertools.combinations(zip(published, predicted, strict=True), 2)
    differing = [(one, other) for one, other in pairs if abs(one[0] / other[0] - 1) >= least]
    right = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in differing)
    return right / len(differing), len(differing)


def mean(errors: Sequence[float]) -> float:
    """Return the mean of the absolute errors."""
    return sum(map(abs, errors)) / len(errors)
