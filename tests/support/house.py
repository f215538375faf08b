"""The two packages' intended import order, and their actual imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

from teaching.lessons import ROOT

PACKAGES = (ROOT / "vgpu", ROOT / "helpers")

# The intended order, leaves first. Within a folder that is a single row, Python itself fails on
# import cycles.
ORDER = [
    "vgpu.torch_releases",
    "vgpu.units",
    "vgpu.tables",
    "vgpu.torch_patches.undo",
    "vgpu.hardware",
    "vgpu.memory",
    "vgpu.tensor",
    "vgpu.collectives.table",
    "vgpu.time",
    "vgpu.torch_patches",
    "vgpu.collectives",
    "vgpu.backend",
    "vgpu.collectives.cluster",
    "vgpu.cuda_is_vgpu",
    "vgpu.run_program",
    "vgpu.__main__",
    "vgpu",
    "vgpu.profiling",
    "vgpu.launch",
    "vgpu.plan.experts",
    "vgpu.plan.transformer",
    "vgpu.plan",
    "helpers.errors",
    "helpers.course.claims",
    "helpers.shell",
    "helpers.autograd_graph",
    "helpers.devices",
    "helpers.data",
    "helpers.text",
    "helpers.gpt",
    "helpers.faulty_traces",
    "helpers.checkpoints",
    "helpers.script",
    "helpers.plots",
    "helpers.widgets",
    "helpers.checks",
    "helpers.course",
]


def row(module: str) -> int | None:
    """Return the row of the longest prefix of the module's name in ORDER, or None."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in ORDER:
            return ORDER.index(name)
    return None


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the full name and file of each of the packages' modules, except ``helpers`` itself."""
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "helpers":
            yield name, path


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the full names of our modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith(("helpers.", "vgpu.")))
