"""A prediction must not be given away: first the guess, then the outcome, then the assertion."""

import re

import pytest

from teaching import lessons

NUMBERED = [path for path in lessons.NOTEBOOKS if lessons.number(path)]
each_lesson = pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)


def places(path, pattern):
    """Map each guess's id, which ``pattern`` captures, to the index of the matching cell."""
    found = {}
    for index, cell in enumerate(lessons.cells(path)):
        for name in re.findall(pattern, cell.source) if cell.is_code else ():
            assert name not in found, f"{cell.id}: {name} occurs twice"
            found[name] = index
    return found


@each_lesson
def test_every_prediction_calls_guess(path):
    cells = lessons.cells(path)
    asked = [
        i
        for i, cell in enumerate(cells)
        if not cell.is_code and re.search(r"\*\*[Pp]redict", cell.source)
    ]
    for index in asked:
        after = cells[index + 1]
        assert after.is_code and "guess(" in after.source, f"{cells[index].id}: no guess() after it"
    taken = places(path, r'\bguess\("(\d+[a-z])"')
    assert sorted(taken.values()) == [index + 1 for index in asked]
    own = str(int(lessons.number(path)))
    letters = "abcdefghijklmnopqrstuvwxyz"[: len(taken)]
    assert list(taken) == [f"{own}{letter}" for letter in letters], "letters must count up from a"


@each_lesson
def test_every_prediction_is_compared_before_anything_is_asserted(path):
    cells = lessons.cells(path)
    taken = places(path, r'\bguess\("(\d+[a-z])"')
    met = places(path, r"\bguess_(\d+[a-z])\.compare\(")
    assert taken.keys() == met.keys(), "each guess_1a = guess(...) needs a guess_1a.compare(...)"
    for name, index in taken.items():
        assert f'guess_{name} = guess("{name}"' in cells[index].source
        between = cells[index : met[name] + 1]
        assert index < met[name] and len(between) <= 8, f"{name} is compared too late"
        for cell in between:
            spoils = cell.is_code and re.search(r"\bassert|\bexpected_error", cell.source)
            assert not spoils, f"{cell.id} gives away the answer to {name}"
