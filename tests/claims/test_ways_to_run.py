"""How a learner may run a lesson: any cell twice in a row, or only the core."""

import pytest
import runs
from levels import sample

from helpers.course import sections
from teaching import lessons


def code(path):
    return [cell for cell in lessons.cells(path) if cell.is_code]


@pytest.mark.parametrize("path", sample(lessons.NOTEBOOKS), ids=lambda path: path.stem[:2])
def test_any_cell_runs_twice_in_a_row(path):
    twice = (cell for cell in code(path) for _ in range(2))
    assert runs.outcome(runs.run_of(twice)) == ("", "")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sample(lessons.NOTEBOOKS[1:-1], 2), ids=lambda path: path.stem[:2])
def test_a_core_runs_without_the_rest_of_its_lesson(path):
    kept = {cell["id"] for cell in sections.core(lessons.raw(path)["cells"])}
    assert runs.outcome(runs.run_of(cell for cell in code(path) if cell.id in kept)) == ("", "")
