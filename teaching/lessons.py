"""The notebooks as files: cells, tags, and the parts of an exercise."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXAM = ROOT / "teaching" / "exam" / "99_exam.ipynb"
"""The exam has the number and exercise ids of a lesson 99, so it's judged like a lesson."""


@dataclass(frozen=True)
class Cell:
    """One cell: its id, kind ("code" or "markdown"), source and tags."""

    id: str
    kind: str
    source: str
    tags: tuple[str, ...]

    @property
    def is_code(self) -> bool:
        return self.kind == "code"


@cache
def raw(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def cells(path: Path) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            cell.get("id", ""),
            cell["cell_type"],
            "".join(cell["source"]),
            tuple(cell["metadata"].get("tags", ())),
        )
        for cell in raw(path)["cells"]
    )


def number(path: Path) -> str:
    """Return the lesson's two digits, or "" for an appendix."""
    found = re.match(r"(\d\d)_", path.name)
    return found[1] if found else ""


def tagged(path: Path, tag: str) -> list[Cell]:
    return [cell for cell in cells(path) if tag in cell.tags]


def heading_above(path: Path, cell_id: str) -> str:
    """Return the text of the last heading before a cell, or in it."""
    found = ""
    for cell in cells(path):
        if not cell.is_code:
            bare = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            found = (re.findall(r"^#+ (.*)$", bare, re.MULTILINE) or [found])[-1]
        if cell.id == cell_id:
            return found
    raise ValueError(f"{path.name} has no cell {cell_id!r}")


def exercise_ids(path: Path) -> list[str]:
    return [
        tag.removeprefix("exercise-")
        for cell in cells(path)
        for tag in cell.tags
        if tag.startswith("exercise-")
    ]


def solution(path: Path, exercise_id: str) -> str:
    """Return the Python code in an exercise's folded solution."""
    (cell,) = tagged(path, f"solution-{exercise_id}")
    return python_in(cell.source)


def python_in(markdown: str) -> str:
    """Return the Python code in the fenced blocks of a Markdown text."""
    return "\n".join(re.findall(r"```python\n(.*?)```", markdown, flags=re.DOTALL))


def answer_expression(path: Path, exercise_id: str) -> str:
    """Return the expression that an exercise's check cell passes as ``check``'s second argument."""
    (cell,) = tagged(path, f"check-{exercise_id}")
    pattern = rf'check\("{re.escape(exercise_id)}",\s*(.*)\)\s*$'
    found = re.search(pattern, cell.source, re.DOTALL)
    assert found, f"{path.name}: the cell check-{exercise_id} calls no check"
    return found[1]
