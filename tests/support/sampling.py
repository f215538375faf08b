"""What ``make test`` takes a sample of, and the public CI runs whole: ``TESTS=whole``.

PyTorch's own suites, random programs, cells that run twice, broken claims, wrong answers, two hosts,
training as a command, the exam, explorers on pages, scripts that start processes, plans'
shortcuts, strategies and collectives. CONTRIBUTING.md says how much of each; a sample is the same each
time and has something of every kind.
"""

import os
import zlib

WHOLE = os.environ.get("TESTS") == "whole"


def sample(cases: list, count: int) -> list:
    """The first of some cases; all of them in a whole run. The most telling stand first."""
    return cases if WHOLE else cases[:count]


def in_third(name: str) -> bool:
    """Whether a name is in the third that ``make test`` takes; all are in a whole run."""
    return WHOLE or zlib.crc32(name.encode()) % 3 == 0
