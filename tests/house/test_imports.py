"""Imports inside the package point one way: a file imports only from rows above its own (ORDER)."""

import ast

import pytest
from house import BEGIN, END, ORDER, PACKAGE, PICTURE, imported_modules, modules, picture, row

import helpers.checks
import helpers.launch
import helpers.plots
import helpers.train
from teaching.lessons import ROOT

MOST_FILES = 12


def test_imports_point_one_way():
    for module, path in modules():
        own = row(module)
        assert own is not None, f"{module} has no row in ORDER (tests/support/house.py)"
        for name in imported_modules(path):
            assert row(name) is not None, f"{module} imports {name}, which has no row in ORDER"
            assert row(name) <= own, f"{module} imports {name}, which stands below it"


def test_the_picture_of_the_parts_is_today_s():
    drawn = PICTURE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert drawn == picture(), "draw it anew: python tests/support/house.py"


def test_every_row_names_something_that_is_there():
    for name in ORDER:
        path = ROOT.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), f"{name} is gone"


@pytest.mark.parametrize("house", ["helpers", "tests", "teaching", "benchmarks"])
def test_no_folder_has_more_than_a_dozen_files(house):
    # Lessons are numbered, and each has a file in the folders that are about lessons.
    for folder in (ROOT / house, *(ROOT / house).rglob("*/")):
        files = [f for f in folder.glob("*.py") if f.name != "__init__.py"]
        files = [f for f in files if not f.name.startswith("lesson_")]
        assert len(files) <= MOST_FILES, f"{folder.relative_to(ROOT)} has {len(files)} files"


def test_init_files_only_hand_names_on():
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            exported = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            handed_on = isinstance(node, ast.ImportFrom)
            assert docstring or exported or handed_on, f"{path}: line {node.lineno} does more"


def test_the_names_that_lessons_use_stay():
    assert {"check", "evaluate", "exercises", "progress", "reset"} <= set(helpers.checks.__all__)
    assert {"COLOURS", "figure"} <= set(helpers.plots.__all__)
    assert {"LaunchError", "RanksHung", "report", "run"} <= set(helpers.launch.__all__)
    assert {"Settings", "Training"} <= set(helpers.train.__all__)
