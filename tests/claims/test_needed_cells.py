"""Which cells another cell needs: those that bind its names, and those that change their values."""

import pytest
from needed_cells import needed

from teaching.lessons import Cell


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["x = 1", "x = 2", "y = 3", "x"], [1, 3]),
        (["x = []", "y = 1", "x.append(2)", "x"], [0, 2, 3]),
        (["def f(): return x", "x = 1", "y = 2", "x = 3", "f()"], [0, 3, 4]),
        (["x = 1", "y = 2", "[x for _ in 'ab']"], [0, 2]),
    ],
    ids=["last binding", "changed value", "names used by a function", "comprehension"],
)
def test_needed_cells_are_those_that_bind_or_change_the_names_used(sources, expected):
    assert found(sources) == expected


def test_a_comprehension_uses_the_names_bound_when_it_runs():
    assert found(["x = 1", "y = [x for _ in 'ab']", "x = 2", "y"]) == [0, 1, 3]


def test_cells_are_not_needed_if_the_last_cell_binds_their_names_itself():
    assert found(["x = 1", "x = 2\ny = [x for _ in 'ab']\n(lambda: x)()"]) == [1]


def found(sources):
    cells = [Cell(str(number), "code", source, ()) for number, source in enumerate(sources)]
    return [int(cell.id) for cell in needed(cells)]
