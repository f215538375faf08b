"""``torch.vgpu.nvtx``: marks for NVIDIA's profilers, which nothing reads here."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

from vgpu.torch_patches.submodules import missing

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]

_handles = itertools.count(1)
_begun = threading.local()


def range_push(msg: str) -> int:
    """Begin a range; returns how many are around it."""
    around: int = getattr(_begun, "count", 0)
    _begun.count = around + 1
    return around


def range_pop() -> int:
    """End the innermost range; returns how many are around it, -1 where none had begun."""
    around: int = getattr(_begun, "count", 0) - 1
    _begun.count = max(around, 0)
    return around


def range_start(msg: str) -> int:
    """Begin a range that any thread may end; returns its handle."""
    return next(_handles)


def range_end(range_id: int) -> None:
    """End the range of a handle."""


def mark(msg: str) -> None:
    """Mark a moment."""


@contextlib.contextmanager
def range(msg: str, *args: object, **kwargs: object) -> Iterator[None]:
    """A range around a block, or around a function that it decorates."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


__getattr__ = missing.of("nvtx")
