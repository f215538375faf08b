"""The skeleton of a lesson passes every test but the one that asks for its words."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from teaching import lessons

NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")


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


def test_its_structure_is_whole_and_its_words_are_asked_for(copy):
    number = f"{len(list(lessons.ROOT.glob('notebooks/[0-9][0-9]_*.ipynb'))):02d}"
    tests = ("tests/lessons", "tests/teaching/test_teaching_guide.py")
    _, said = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    failed = re.findall(r"^FAILED (\S+)", said, re.MULTILINE)
    asked = f"test_nothing_of_the_skeleton_is_left[{number}_one_more]"
    assert [name.partition("::")[2] for name in failed] == [asked], said
    for place in (f"{number}_one_more.ipynb: opening", "README.md", "docs/teaching.md"):
        assert place in said


def test_it_runs_and_its_exercises_are_judged(copy):
    number = len(list(lessons.ROOT.glob("notebooks/[0-9][0-9]_*.ipynb")))
    exercises = ("tests/checks/test_exercises.py", "-k", f"[{number}. or same_exercises")
    status, said = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *exercises)
    assert status == 0 and "\n10 passed" in said, said
    notebook = f"notebooks/{number:02d}_one_more.ipynb"
    status, said = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", notebook)
    assert status == 0, said


def test_its_code_is_in_good_order(copy):
    for tool in (("check",), ("format", "--check")):
        status, said = run(copy, "-m", "ruff", *tool, "helpers", "tests", "notebooks")
        assert status == 0, said
