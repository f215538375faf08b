"""A learner runs a cell again to look twice: in a lesson, any cell may run twice in a row."""

import pytest
import runs
from levels import sample

from teaching import lessons


@pytest.mark.parametrize("path", sample(lessons.NOTEBOOKS), ids=lambda path: path.stem[:2])
def test_any_cell_runs_twice_in_a_row(path):
    code = [cell for cell in lessons.cells(path) if cell.is_code]
    assert runs.outcome(runs.run_of(cell for cell in code for _ in range(2))) == ("", "")
