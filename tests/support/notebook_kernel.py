"""A Jupyter kernel as lessons have one, and which of a lesson's cells another cell needs."""

import ast
import re
import symtable
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jupyter_client.manager import KernelManager

from teaching.lessons import Cell

CELL_SECONDS = 600  # a machine with other work is slow; pytest ends what hangs
PATCH = """
import unittest.mock
def patch(target, new): unittest.mock.patch(target, new).start()
"""
FROZEN = """
import helpers.forkserver.unswept, helpers.checks, helpers.plots, torch._dynamo
import gc
gc.collect()
gc.freeze()
gc.enable()
%reset -f
"""
UNDO = """
import unittest.mock
unittest.mock.patch.stopall()
%reset -f
from helpers import vgpu
vgpu.disable()
del vgpu
"""


class Kernel:
    """Runs code as lessons do, each time without names and without virtual GPUs to begin with."""

    def __init__(self, client):
        self._client = client

    def run(self, cells: Sequence[Cell], before: str = "") -> tuple[str, str]:
        """Run cells in order, with ``before`` ahead of the last; stop at the first error.

        Returns the id of the cell that failed and its "<kind>: <message>", or two empty strings.
        ``before`` has the id "before".
        """
        steps = [(cell.id, cell.source) for cell in cells]
        steps.insert(-1, ("before", PATCH + before))
        try:
            for name, source in steps:
                error = self._execute(source)
                if error:
                    return name, error
            return "", ""
        finally:
            self._execute(UNDO)

    def _execute(self, source: str) -> str:
        reply = self._client.execute_interactive(
            source, timeout=CELL_SECONDS, allow_stdin=False, output_hook=lambda message: None
        )["content"]
        return "" if reply["status"] == "ok" else f"{reply['ename']}: {reply['evalue']}"


@contextmanager
def started(folder: Path) -> Iterator[Kernel]:
    """A kernel that works in ``folder``, for many lessons' cells.

    It has imported what lessons import, and its collections of garbage leave that out: a quarter of
    a second each.
    """
    manager = KernelManager()
    # A kernel warns on the terminal that it listens on this machine.
    manager.start_kernel(cwd=str(folder), extra_arguments=["--log-level=ERROR"])
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=CELL_SECONDS)
        kernel = Kernel(client)
        assert kernel.run([Cell("frozen", "code", FROZEN, ())]) == ("", "")
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def needed(cells: Sequence[Cell], also: Sequence[str] = ()) -> list[Cell]:
    """The code cells that the last one needs, in order, itself included.

    They are the last to bind a name that is used, and those that change its value afterwards by an
    assignment or a method call, and so on for each cell found. ``also`` names cells by id that are
    needed for another reason.
    """
    code = [cell for cell in cells if cell.is_code]
    facts = [_names(cell.source) for cell in code]
    modules = set().union(*(names.imported for names in facts))
    found = {index for index, cell in enumerate(code) if cell.id in also} | {len(code) - 1}
    to_do = list(found)
    while to_do:
        index = to_do.pop()
        uses = [(name, index) for name in facts[index].used]
        # What a function uses is looked up when it is called.
        uses += [(name, len(code) - 1) for name in facts[index].used_later]
        for name, end in uses:
            binds = [i for i in range(end) if name in facts[i].bound]
            changes = [i for i in range(end) if name in facts[i].changed - modules]
            last = binds[-1:]
            for i in [*last, *(i for i in changes if last and i > last[0])]:
                if i not in found:
                    found.add(i)
                    to_do.append(i)
    return [code[index] for index in sorted(found)]


@dataclass(frozen=True)
class _Names:
    """The names that a cell binds, imports, uses, uses inside functions, and changes the value of.

    A name that the cell itself binds first is not used from elsewhere.
    """

    bound: set[str]
    imported: set[str]
    used: set[str]
    used_later: set[str]
    changed: set[str]


def _names(source: str) -> _Names:
    source = re.sub(r"^[ \t]*[%!].*$", "", source, flags=re.MULTILINE)  # IPython's own
    names = _Names(set(), set(), set(), set(), set())
    for statement in _steps(ast.parse(source).body):
        top = symtable.symtable(ast.unparse(statement), "<cell>", "exec")
        symbols = top.get_symbols()
        inner = top.get_children()
        for table in inner:  # grows as it goes
            inner += table.get_children()
        later = {s.get_name() for t in inner for s in t.get_symbols() if s.is_global()}
        names.used.update(({s.get_name() for s in symbols if s.is_referenced()}) - names.bound)
        names.used_later.update(later)
        names.bound.update(s.get_name() for s in symbols if s.is_assigned() or s.is_imported())
        names.imported.update(s.get_name() for s in symbols if s.is_imported())
        names.changed.update(_root(node) for node in _changes(statement))
    # A name that a function uses may be there already when the cell calls it.
    names.used.update(names.used_later - names.bound)
    return names


def _steps(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements in the order in which they run; blocks are taken apart.

    So a name that a loop's body binds before it uses it is not used from elsewhere.
    """
    for statement in statements:
        match statement:
            case ast.For():
                yield ast.Expr(statement.iter)
                yield _binds(statement.target)
            case ast.With():
                for item in statement.items:
                    yield ast.Expr(item.context_expr)
                    if item.optional_vars:
                        yield _binds(item.optional_vars)
            case ast.If() | ast.While():
                yield ast.Expr(statement.test)
            case _:
                yield statement
                continue
        yield from _steps(statement.body)
        yield from _steps(getattr(statement, "orelse", []))


def _binds(target: ast.expr) -> ast.stmt:
    return ast.Assign([target], ast.Constant(None), lineno=0)


def _changes(tree: ast.AST) -> Iterator[ast.AST]:
    """What is stored into, or called as a statement, outside functions and classes."""
    if isinstance(tree, ast.FunctionDef | ast.ClassDef | ast.Lambda):
        return
    if isinstance(tree, ast.Attribute | ast.Subscript) and isinstance(tree.ctx, ast.Store):
        yield tree
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Call):
        yield tree.value
    for node in ast.iter_child_nodes(tree):
        yield from _changes(node)


def _root(node: ast.AST) -> str:
    """The name that an expression such as ``a.b[0].c`` begins with; "" for another expression."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
