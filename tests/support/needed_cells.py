"""Which of a lesson's cells another cell needs."""

import ast
import re
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from teaching.lessons import Cell

_COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")


def needed(cells: Sequence[Cell], also: Sequence[str] = ()) -> list[Cell]:
    """Return the code cells that the last one needs, in order, including itself.

    For each name used, these are the last cell that binds it, and those that change its value
    afterward by an assignment or a method call; the same applies to each cell found. ``also`` has
    the ids of cells that are needed for other reasons.
    """
    code = [cell for cell in cells if cell.is_code]
    facts = [_names(cell.source) for cell in code]
    modules = set().union(*(names.imported for names in facts))
    found = {index for index, cell in enumerate(code) if cell.id in also} | {len(code) - 1}
    to_do = list(found)
    while to_do:
        index = to_do.pop()
        uses = [(name, index) for name in facts[index].used]
        # Names in a function are looked up when it's called, at the latest in the last cell.
        own = facts[index].bound if index == len(code) - 1 else set()
        uses += [(name, len(code) - 1) for name in facts[index].used_later - own]
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

    A name that the cell binds before using it doesn't count as used.
    """

    bound: set[str]
    imported: set[str]
    used: set[str]
    used_later: set[str]
    changed: set[str]


@cache
def _names(source: str) -> _Names:
    source = re.sub(r"^[ \t]*[%!].*$", "", source, flags=re.MULTILINE)  # IPython's syntax
    names = _Names(set(), set(), set(), set(), set())
    for statement in _steps(ast.parse(source).body):
        top = symtable.symtable(ast.unparse(statement), "<cell>", "exec")
        symbols = top.get_symbols()
        at_once, later = _used_inside(top)
        at_once |= {s.get_name() for s in symbols if s.is_referenced()}
        names.used.update(at_once - names.bound)
        names.used_later.update(later)
        names.bound.update(s.get_name() for s in symbols if s.is_assigned() or s.is_imported())
        names.imported.update(s.get_name() for s in symbols if s.is_imported())
        names.changed.update(_root(node) for node in _changes(statement))
    # A name used in a function may already be bound when the cell calls it.
    names.used.update(names.used_later - names.bound)
    return names


def _used_inside(top: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Return the global names used in comprehensions, which run at once, and in functions."""
    at_once, later = set(), set()
    tables = [(table, False) for table in top.get_children()]
    for table, in_function in tables:  # grows during the loop
        in_function = in_function or table.get_name() not in _COMPREHENSIONS
        found = later if in_function else at_once
        found.update(s.get_name() for s in table.get_symbols() if s.is_global())
        tables += [(inner, in_function) for inner in table.get_children()]
    return at_once, later


def _steps(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements in the order in which they run, with blocks flattened.

    This way, a name that a loop's body binds before using it doesn't count as used.
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
    """Yield what's assigned to, or called as a statement, outside functions and classes."""
    if isinstance(tree, ast.FunctionDef | ast.ClassDef | ast.Lambda):
        return
    if isinstance(tree, ast.Attribute | ast.Subscript) and isinstance(tree.ctx, ast.Store):
        yield tree
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Call):
        yield tree.value
    for node in ast.iter_child_nodes(tree):
        yield from _changes(node)


def _root(node: ast.AST) -> str:
    """Return the name that an expression such as ``a.b[0].c`` starts with, or "" if none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
