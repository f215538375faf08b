"""Which private names of torch the code uses, as far as that can be read from it."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from teaching.lessons import ROOT

# Tests that use a private name themselves fail if it's gone.
FOLDERS = ("vgpu", "helpers", "teaching", "benchmarks", "tests/conformance")
# A string such as the target of mock.patch, with a private part somewhere.
_WRITTEN_OUT = re.compile(r"torch(?:\.\w+)*\._[A-Za-z]\w*(?:\.\w+)*")
_PRIVATE = re.compile(r"_(?!_)")
_REPLACING = ("set", "wrap")


def uses() -> dict[str, set[str]]:
    """Private name of torch → the files that use it, relative to the repository's root.

    A name ends one part after its last private one: ``torch._C._autograd.DeviceType``.
    """
    found: dict[str, set[str]] = {}
    for path, tree in sources():
        for name in _names(tree):
            if (cut := _cut(name)) is not None:
                found.setdefault(cut, set()).add(path.relative_to(ROOT).as_posix())
    # A module counts by what's used from it.
    return {name: files for name, files in found.items() if not _only_on_the_way(name, found)}


def _only_on_the_way(name: str, others: Iterable[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in others)


def text() -> str:
    """Everything that's read here, concatenated."""
    return "\n".join(ast.unparse(tree) for _, tree in sources())


def foreign_attributes() -> dict[str, str]:
    """Private attribute, of any object, that the package reads but doesn't define → a place."""
    defined, read = set(), {}
    for path, tree in sources():
        if path.relative_to(ROOT).parts[0] not in ("vgpu", "helpers"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            elif isinstance(node, ast.Attribute) and _PRIVATE.match(node.attr):
                read[node.attr] = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
    return {name: place for name, place in read.items() if name not in defined}


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    """All files and cells, parsed: half a million objects, to be cleared when they're no longer needed."""
    return [*_read()]


def _read() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code" and not cell["source"][0].startswith("%%"):
                lines = [
                    line for line in cell["source"] if not line.lstrip().startswith(("%", "!"))
                ]
                yield path, ast.parse("".join(lines))


def _cut(name: str) -> str | None:
    parts = name.split(".")
    private = [i for i, part in enumerate(parts) if _PRIVATE.match(part)]
    if parts[0] != "torch" or not private:
        return None
    return ".".join(parts[: private[-1] + 2])


def _names(tree: ast.Module) -> Iterator[str]:
    """The full dotted names in a file: imported, read, replaced by name, or written as a string."""
    full: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                local = alias.asname or alias.name.partition(".")[0]
                full[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield _dotted(node, full)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _WRITTEN_OUT.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _REPLACING:
            owner, name = [*node.args, None, None][:2]
            if isinstance(name, ast.Constant) and isinstance(owner, (ast.Name, ast.Attribute)):
                yield f"{_dotted(owner, full)}.{name.value}"


def _dotted(node: ast.expr, full: dict[str, str]) -> str:
    """``torch.nn.init`` from its syntax tree, with names as imported; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, full)
        return before and f"{before}.{node.attr}"
    return full.get(node.id, "") if isinstance(node, ast.Name) else ""
