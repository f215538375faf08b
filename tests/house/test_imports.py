"""Imports within the packages point one way: no module imports from a lower row of ORDER."""

import ast

import pytest
from house import ORDER, PACKAGES, imported_modules, modules, row

import helpers.checks
import helpers.plots
import vgpu.launch
from teaching.lessons import ROOT


def test_imports_point_one_way():
    for module, path in modules():
        own = row(module)
        assert own is not None, f"{module} has no row in ORDER (tests/support/house.py)"
        for name in imported_modules(path):
            assert row(name) is not None, f"{module} imports {name}, which has no row in ORDER"
            assert row(name) <= own, f"{module} imports {name}, which is below it in ORDER"


def test_every_row_of_order_names_an_existing_module():
    for name in ORDER:
        path = ROOT.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), f"there is no {name}"


def test_the_library_imports_nothing_from_the_course():
    for module, path in modules():
        if module.partition(".")[0] == "vgpu":
            names = [n for n in imported_modules(path) if n.startswith(("helpers", "teaching"))]
            assert not names, f"{module} imports {names}"


def test_the_library_reads_none_of_the_courses_environment_variables():
    for module, path in modules():
        if module.partition(".")[0] == "vgpu":
            assert "COURSE_" not in path.read_text(encoding="utf-8"), module


def test_init_files_only_reexport_names():
    for path in (path for package in PACKAGES for path in package.rglob("__init__.py")):
        if path.parent.name == "helpers":
            continue  # it says which modules moved to the library
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            exported = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            handed_on = isinstance(node, ast.ImportFrom)
            assert docstring or exported or handed_on, (
                f"{path}: line {node.lineno} does more than re-export"
            )


def test_the_names_that_lessons_use_are_exported():
    assert {"check", "evaluate", "exercises", "progress", "reset"} <= set(helpers.checks.__all__)
    assert {"COLORS", "figure"} <= set(vars(helpers.plots))
    assert {"LaunchError", "RanksHung", "run", "warm_up"} <= set(vgpu.launch.__all__)


def test_the_error_for_an_old_import_names_the_new_one():
    with pytest.raises(ImportError, match="write import vgpu"):
        from helpers import vgpu  # noqa: F401
    with pytest.raises(ImportError, match="write from vgpu import launch"):
        from helpers import launch  # noqa: F401
