"""Imports inside the package point one way: a file imports only from rows above its own."""

import ast

import helpers.checks
import helpers.plots
from teaching.lessons import ROOT

PACKAGE = ROOT / "helpers"

# The order of the design, leaves first. A folder stands for its files; within one, cycles are
# still impossible because Python itself would fail on them at import.
ORDER = [
    "helpers.errors",
    "helpers.units",
    "helpers.tables",
    "helpers.claims",
    "helpers.calls",
    "helpers.shell",
    "helpers.machine",
    "helpers.autograd_graph",
    "helpers.vgpu",
    "helpers.memory",
    "helpers.devices",
    "helpers.rank_output",
    "helpers.rank_places",
    "helpers.worker",
    "helpers.rank_team",
    "helpers.rank_hangs",
    "helpers.rank_faults",
    "helpers.launch",
    "helpers.data",
    "helpers.models",
    "helpers.checkpoints",
    "helpers.meeting",
    "helpers.training",
    "helpers.train",
    "helpers.schedules",
    "helpers.schedule_time",
    "helpers.plots",
    "helpers.widgets",
    "helpers.checks",
    "helpers.course",
]


def row(module):
    found = [
        index for index, name in enumerate(ORDER) if module == name or module.startswith(name + ".")
    ]
    return found[0] if found else None


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
        yield from (name for name in names if name.startswith("helpers"))


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
