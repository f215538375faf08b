"""The two levels of tests: ``make test``, and ``make test-all``, which sets TESTS=all.

``make test`` runs every lesson, every exercise and all unit tests. Of suites with many cases that
take long it runs the first ones, which are the most telling; ``make test-all`` runs all of them.
"""

import os

ALL = os.environ.get("TESTS") == "all"


def sample(cases: list, count: int = 1) -> list:
    """The first cases of a suite under ``make test``, all of them under ``make test-all``."""
    return cases if ALL else cases[:count]
