"""Whether a prediction would choose as a measurement does."""

import itertools
from collections.abc import Sequence


def order(published: Sequence[float], predicted: Sequence[float]) -> str:
    """How many pairs of rows the prediction puts in their order; equal rows have none."""
    pairs = list(itertools.combinations(zip(published, predicted, strict=True), 2))
    differing = [(one, other) for one, other in pairs if one[0] != other[0]]
    right = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in differing)
    return f"{right} of {len(differing)} pairs of rows come out in their published order."
