"""How well predictions rank configurations, compared with measurements, and how far off they are."""

import itertools
from collections.abc import Sequence

_DIFFER = 0.03
"""Rows whose measurements differ by less are too close to rank."""


def order(published: Sequence[float], predicted: Sequence[float]) -> str:
    """Say what fraction of the pairs of differing rows is predicted in the published order."""
    pairs = itertools.combinations(zip(published, predicted, strict=True), 2)
    differing = [(one, other) for one, other in pairs if abs(one[0] / other[0] - 1) >= _DIFFER]
    right = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in differing)
    return (
        f"Of {len(differing):,} pairs of rows that differ by {_DIFFER:.0%} or more, "
        f"{right / len(differing):.1%} are predicted in the right order."
    )


def mean(errors: Sequence[float]) -> float:
    """Return the mean of the absolute errors."""
    return sum(map(abs, errors)) / len(errors)
