"""The skeleton of a lesson passes every test but the one that asks for its words."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from teaching import lessons

NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")

NUMBER = f"{len(list(lessons.ROOT.glob('notebooks/[0-9][0-9]_*.ipynb'))):02d}"
EXERCISES = (
    "test_lessons_and_checks_name_the_same_exercises",
    "test_the_stub_alone_is_not_attempted",
    "test_the_folded_solution_passes",
    "test_typical_wrong_answers_fail_with_their_hint",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the course, with one lesson more."""
    root = tmp_path_factory.mktemp("course") / "copy"
    shutil.copytree(lessons.ROOT, root, ignore=NOT_COPIED)
    run(root, "-m", "teaching.new_lesson", "One more: a lesson")
    return root


def run(root, *arguments):
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tried(copy):
    """What the tests that concern the new lesson say: which failed, which passed, and all of it."""
    (notebook,) = copy.glob(f"notebooks/{NUMBER}_*.ipynb")
    exercises = "tests/helpers/checks/test_exercises.py"
    tests = ["tests/lessons", "tests/teaching/test_teaching_guide.py", notebook]
    tests += [f"{exercises}::{EXERCISES[0]}"]
    tests += [
        f"{exercises}::{t}[{e}]" for t in EXERCISES[1:] for e in lessons.exercise_ids(notebook)
    ]
    options = ("-q", "-rfEp", "-p", "no:cacheprovider", "--nbmake")
    _, said = run(copy, "-m", "pytest", *options, *tests)
    failed, passed = (
        re.findall(rf"^{word} (\S+)", said, re.MULTILINE) for word in ("(?:FAILED|ERROR)", "PASSED")
    )
    return failed, passed, said


def test_its_structure_is_whole_and_its_words_are_asked_for(tried):
    failed, _, said = tried
    asked = f"test_nothing_of_the_skeleton_is_left[{NUMBER}_one_more]"
    assert [name.partition("::")[2] for name in failed] == [asked], said
    for place in (f"{NUMBER}_one_more.ipynb: opening", "README.md", "docs/teaching.md"):
        assert place in said


def test_it_runs_and_its_exercises_are_judged(tried):
    _, passed, said = tried
    judged = [
        name for name in passed if name.startswith("tests/helpers/checks/test_exercises.py::")
    ]
    assert len(judged) == 10 and set(EXERCISES) == {
        name.partition("::")[2].partition("[")[0] for name in judged
    }, said
    assert any(name.startswith(f"notebooks/{NUMBER}_one_more.ipynb") for name in passed), said


def test_its_code_is_in_good_order(copy):
    for tool in (("check",), ("format", "--check")):
        status, said = run(copy, "-m", "ruff", *tool, "vgpu", "helpers", "tests", "notebooks")
        assert status == 0, said
