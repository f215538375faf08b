"""Fewer looks for garbage, where records are made that are many and stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Looking through events for cycles again and again would be in vain."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
