"""What numbers a cost model takes: ValueError for any other.

A time that is not a number makes a player wait for ever, and one below zero a step that ends before
it begins.
"""

import math
from numbers import Integral, Real


def check_share(name: str, value: object) -> None:
    """A part of a whole that is not nothing."""
    if not _is_real(value) or not 0 < value <= 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")


def check_seconds(name: str, value: object) -> None:
    if not _is_real(value) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be seconds, finite and not negative, got {value!r}")


def check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
