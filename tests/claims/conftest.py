"""One process for all runs of lessons' cells: importing torch takes longer than most of them."""

import os

import forked_runs
import pytest

from teaching import lessons


@pytest.fixture(scope="session")
def player():
    if not hasattr(os, "fork"):
        pytest.skip("runs of cells that begin alike are forks, which this system has none of")
    with forked_runs.started(lessons.ROOT / "notebooks") as running:
        yield running
