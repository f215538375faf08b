"""The parts of the package: the order of imports, the imports that there are, and their picture.

    python tests/support/house.py

draws the picture in docs/architecture.md anew.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from teaching.lessons import ROOT

PACKAGE = ROOT / "helpers"
PICTURE = ROOT / "docs" / "architecture.md"
BEGIN, END = "```mermaid\n", "```\n"

# The order of the design, leaves first. Inside a folder that has no rows of its own, Python itself
# fails on a cycle at import.
ORDER = [
    "helpers.errors",
    "helpers.units",
    "helpers.tables",
    "helpers.course.claims",
    "helpers.calls",
    "helpers.shell",
    "helpers.autograd_graph",
    "helpers.forkserver",
    # Virtual GPUs, in layers.
    "helpers.vgpu.torch_releases",
    "helpers.vgpu.changes",
    "helpers.vgpu.device",
    "helpers.vgpu.dispatch",
    "helpers.vgpu.timing",
    "helpers.vgpu.torch_api",
    "helpers.vgpu.distributed",
    "helpers.vgpu.shapes",
    "helpers.vgpu.backend",
    "helpers.vgpu.cluster",
    "helpers.vgpu.iterations",
    "helpers.vgpu.cuda_words",
    "helpers.vgpu.program",
    "helpers.vgpu.__main__",
    "helpers.vgpu.enabled",
    "helpers.vgpu",
    "helpers.memory",
    "helpers.peaks",
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
    "helpers.text",
    "helpers.models",
    "helpers.schedules",
    "helpers.parallel",
    "helpers.meshes",
    "helpers.plan",
    "helpers.train",
    "helpers.plots",
    "helpers.widgets",
    "helpers.checks",
    "helpers.course",
]


def row(module: str) -> int | None:
    """The row of the longest name in ORDER that the module stands under; None where none does."""
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        name = ".".join(parts[:end])
        if name in ORDER:
            return ORDER.index(name)
    return None


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package but the package itself: its full name and its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "helpers":
            yield name, path


def imported_modules(path: Path) -> Iterator[str]:
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


def part(module: str) -> str:
    """The part of the picture that a module is in: a folder, or a file of the package's root.

    In ``vgpu`` each layer is a part; its other files are one above the layers, or one below.
    """
    parts = module.split(".")[1:]
    if parts[0] != "vgpu":
        return parts[0]
    if len(parts) > 1 and (PACKAGE / "vgpu" / parts[1]).is_dir():
        return f"vgpu.{parts[1]}"
    own, layers = row(module), row("helpers.vgpu.device")
    assert own is not None and layers is not None, f"{module} has no row in ORDER"
    return parts[0] if own > layers else ORDER[own].removeprefix("helpers.")


def imports_between_parts() -> dict[str, set[str]]:
    """Part → the parts that it imports from."""
    found = defaultdict(set)
    for module, path in modules():
        for name in imported_modules(path):
            if part(name) != part(module):
                found[part(module)].add(part(name))
    return dict(found)


def picture() -> str:
    """The parts as a Mermaid flowchart, in which an arrow reads "imports".

    Parts that import nothing of ours share a box; an import that other arrows already imply is left
    out.
    """
    imports = imports_between_parts()
    parts = list(dict.fromkeys(part(name) for name in ORDER))
    leaves = [name for name in parts if not imports.get(name) and not name.startswith("vgpu")]
    below: dict[str, set[str]] = {}
    arrows = []
    for name in parts:  # leaves first
        near = {"leaves" if t in leaves else t for t in imports.get(name, ())}
        below[name] = near.union(*(below.get(target, set()) for target in near))
        near = {t for t in near if not any(t in below.get(other, ()) for other in near)}
        arrows += [f"{_box(name)} --> {_box(t)}" for t in ("leaves", *parts) if t in near]
    layers = [name for name in parts if name.startswith("vgpu")]
    others = [name for name in parts if name not in (*layers, *leaves)]
    lines = [
        "flowchart TB",
        *(f'    {_box(name)}["{name}"]' for name in reversed(others)),
        '    subgraph layers["helpers.vgpu"]',
        *(f'        {_box(name)}["{name}"]' for name in reversed(layers)),
        "    end",
        f'    leaves["{", ".join(leaves)}"]',
        *(f"    {arrow}" for arrow in reversed(arrows)),
    ]
    return "\n".join(lines) + "\n"


def _box(name: str) -> str:
    return name.replace(".", "_")


def redraw() -> None:
    """Put the picture of today into the page."""
    text = PICTURE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PICTURE.write_text(before + BEGIN + picture() + END + after, encoding="utf-8")


if __name__ == "__main__":
    redraw()
