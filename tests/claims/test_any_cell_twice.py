"""A learner runs a cell again to look twice: in a lesson, any cell may run twice in a row.

``TESTS=whole`` in the environment tries every lesson (five minutes); without it two that start no ranks
and train for no longer than a moment.
"""

import pytest
from forked_runs import run_of
from sampling import WHOLE

from teaching import lessons

QUICK = ("00", "02")
TRIED = [path for path in lessons.NOTEBOOKS if WHOLE or lessons.number(path) in QUICK]


@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem[:2])
def test_any_cell_runs_twice_in_a_row(player, path):
    code = [cell for cell in lessons.cells(path) if cell.is_code]
    assert player.outcome(run_of(cell for cell in code for _ in range(2))) == ("", "")
