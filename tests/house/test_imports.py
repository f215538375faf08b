"""Imports inside the package point one way: a file imports only from rows above its own."""

import ast

import pytest

import helpers.checks
import helpers.launch
import helpers.plots
import helpers.train
from teaching.lessons import ROOT

PACKAGE = ROOT / "helpers"

# The order of the design, leaves first. Inside a folder that has no rows of its own, Python itself
# fails on a cycle at import.
ORDER = [
    "helpers.errors",
    "helpers.units",
    "helpers.tables",
    "helpers.claims",
    "helpers.calls",
    "helpers.shell",
    "helpers.autograd_graph",
    # Virtual GPUs, in layers.
    "helpers.vgpu.changes",
    "helpers.vgpu.device",
    "helpers.vgpu.dispatch",
    "helpers.vgpu.timing",
    "helpers.vgpu.torch_api",
    "helpers.vgpu.shape_results",
    "helpers.vgpu.shapes",
    "helpers.vgpu.iterations",
    "helpers.vgpu.backend",
    "helpers.vgpu.enabled",
    "helpers.vgpu",
    "helpers.memory",
    "helpers.devices",
    # A function on several processes: what a rank needs before what its parent needs.
    "helpers.launch.errors",
    "helpers.launch.machine",
    "helpers.launch.own_code",
    "helpers.launch.guard",
    "helpers.launch.payload",
    "helpers.launch.output",
    "helpers.launch.places",
    "helpers.launch.rank",
    "helpers.launch.team",
    "helpers.launch.hangs",
    "helpers.launch.faults",
    "helpers.launch.launcher",
    "helpers.launch",
    "helpers.data",
    "helpers.models",
    "helpers.train",
    "helpers.schedules",
    "helpers.plots",
    "helpers.widgets",
    "helpers.checks",
    "helpers.course",
]

MOST_FILES = 12


def row(module):
    """The row of the longest name in ORDER that the module stands under; None where none does."""
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        name = ".".join(parts[:end])
        if name in ORDER:
            return ORDER.index(name)
    return None


def imported_modules(path):
    """Modules of ours that a file imports, as full names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("helpers."))


def test_imports_point_one_way():
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        if module == "helpers":
            continue
        own = row(module)
        assert own is not None, f"{module} has no row in ORDER"
        for name in imported_modules(path):
            assert row(name) is not None, f"{module} imports {name}, which has no row in ORDER"
            assert row(name) <= own, f"{module} imports {name}, which stands below it"


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
