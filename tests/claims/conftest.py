"""One kernel for all lessons: importing torch takes longer than most of their cells."""

import notebook_kernel
import pytest

from teaching import lessons


@pytest.fixture(scope="session")
def kernel():
    with notebook_kernel.started(lessons.ROOT / "notebooks") as running:
        yield running
