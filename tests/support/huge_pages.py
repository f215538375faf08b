"""Imported last in a process that others are forked from: its memory becomes pages of 2 MiB.

A fork copies a table of all pages, and at its end goes through it once more. For torch's 90,000 pages
that took 30 ms of computing, for huge ones 8; to make them so takes a second. Where Linux cannot
(before 6.1), or another system is at work, nothing changes.
"""

import contextlib
import ctypes
import re
from pathlib import Path

_COLLAPSE = 25  # MADV_COLLAPSE of Linux's mman.h
HUGE = 2 << 20
_OWN_MEMORY = re.compile(r"(\w+)-(\w+) rw\S+ 0+ 00:00 0 +(?:\[heap\])?\n")


def collapse():
    """Ask Linux for huge pages where this process has memory that stands in no file."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for first, last in _OWN_MEMORY.findall(Path("/proc/self/maps").read_text()):
        start, end = -(-int(first, 16) // HUGE) * HUGE, int(last, 16) // HUGE * HUGE
        if start < end:
            madvise(start, end - start, _COLLAPSE)


with contextlib.suppress(OSError, AttributeError):
    collapse()
