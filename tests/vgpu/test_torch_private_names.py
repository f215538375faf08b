"""The private torch names that the code uses exist in this torch, as far as static checks can tell.

Attributes of objects can't be checked; a name that virtual GPUs replace is looked up when they're
enabled.
"""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import torch

import vgpu
from teaching import lessons

FOLDERS = ("vgpu", "helpers", "teaching", "benchmarks", "tests/conformance")
# A string with a private part, such as a target of mock.patch.
WRITTEN_OUT = re.compile(r"torch(?:\.\w+)*\._[A-Za-z]\w*(?:\.\w+)*")
PRIVATE = re.compile(r"_(?!_)")
# In a separate process: torch's test suites change settings of the process that imports them.
LOOK = """
import gc; gc.disable()
import json, os, pkgutil, sys
import torch, torch.distributed.fsdp, torch.distributed.tensor, torch.utils.backend_registration
missing = {}
for name in sys.argv[1:]:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError) as error:
        missing[name] = str(error)
print(json.dumps(missing), flush=True)
os._exit(0)  # taking down all that was imported would take a second
"""

# These are patched on import; other tests in this process may or may not have imported them.
IMPORTED_LATE = (
    "torch.distributed._symmetric_memory",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
)


def test_every_private_name_that_the_code_uses_exists():
    uses = private_names()
    assert "torch._C._swap_tensor_impl" in uses
    done = subprocess.run([sys.executable, "-c", LOOK, *uses], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout)
    gone = [f"{name} ({error}): {', '.join(uses[name])}" for name, error in missing.items()]
    assert not gone, "\n".join([f"torch {torch.__version__} lacks", *gone])


def test_every_name_that_virtual_gpus_replace_exists():
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    with vgpu.enable(2):  # raises AttributeError (on a newer torch, warns) with the missing names
        pass


def private_names() -> dict[str, list[str]]:
    """Return each private torch name and the files that use it.

    A name ends one part after its last private one: ``torch._C._autograd.DeviceType``.
    """
    found: dict[str, set[str]] = {}
    for path, tree in sources():
        for name in names_in(tree):
            parts = name.split(".")
            private = [i for i, part in enumerate(parts) if PRIVATE.match(part)]
            if parts[0] == "torch" and private:
                found.setdefault(".".join(parts[: private[-1] + 2]), set()).add(path)
    # A module counts only through the names used from it.
    return {
        name: sorted(paths)
        for name, paths in found.items()
        if not any(other.startswith(f"{name}.") for other in found)
    }


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((lessons.ROOT / folder).rglob("*.py")):
            name = path.relative_to(lessons.ROOT).as_posix()
            yield name, ast.parse(path.read_text(encoding="utf-8"))
    for path in lessons.NOTEBOOKS:
        for cell in lessons.cells(path):
            if cell.is_code and not cell.source.startswith("%%"):
                lines = re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.MULTILINE)
                yield path.name, ast.parse(lines)


def names_in(tree: ast.Module) -> Iterator[str]:
    """Return a file's dotted names: imported, read, replaced by name, or written as a string."""
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
            yield dotted(node, full)
        elif isinstance(node, ast.Constant) and WRITTEN_OUT.fullmatch(str(node.value)):
            yield node.value


def dotted(node: ast.expr, full: dict[str, str]) -> str:
    """Return ``torch.nn.init`` from its syntax tree, with imported names; "" otherwise."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, full)
        return before and f"{before}.{node.attr}"
    return full.get(node.id, "") if isinstance(node, ast.Name) else ""
