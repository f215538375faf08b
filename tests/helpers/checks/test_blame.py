"""Which lines count as the learner's, as opposed to a library's or the course's."""

import pytest

import helpers.checks.on_ranks
from helpers.checks import blame, core
from teaching.exam import planning as exam
from vgpu.launch.hangs import is_library


@pytest.mark.parametrize("path", [helpers.checks.on_ranks.__file__, core.__file__, exam.__file__])
def test_the_courses_own_files_are_neither_the_learners_nor_a_librarys(path):
    assert not is_library(path) and not blame.is_learners(path)


@pytest.mark.parametrize("path", ["<cell 1>", "/tmp/ipykernel_7/2718281828.py", "train.py"])
def test_cells_and_scripts_count_as_the_learners_code(path):
    assert blame.is_learners(path) and not is_library(path)


def test_an_error_raised_in_a_package_is_reported_at_the_learners_line():
    """The package is in lib64, a folder that the checks used to miss."""
    names = {}
    source = "def pick(numbers):\n    raise LookupError('no such row')\n"
    exec(compile(source, "/usr/lib64/python3.13/site-packages/frames/pick.py", "exec"), names)
    exec(compile("def answer():\n    return pick([])\n", "<cell 1>", "exec"), names)
    try:
        names["answer"]()
    except LookupError as error:
        line = blame.own_line(error)
    assert "in line 2 of your cell" in line
