"""A learner runs a cell again to look twice: in a lesson, any cell may run twice in a row.

``LESSONS=full`` in the environment tries every lesson (five minutes); without it those that start
no ranks and train for no longer than a moment.
"""

import os

import notebook_kernel
import pytest

from teaching import lessons

QUICK = ("00", "01", "02", "04")
TRIED = [
    path
    for path in lessons.NOTEBOOKS
    if os.environ.get("LESSONS") == "full" or lessons.number(path) in QUICK
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem[:2])
def test_any_cell_runs_twice_in_a_row(path):
    code = [cell for cell in lessons.cells(path) if cell.is_code]
    with notebook_kernel.started(lessons.ROOT / "notebooks") as kernel:
        failed = kernel.run([cell for cell in code for _ in range(2)])
    assert failed == ("", "")
