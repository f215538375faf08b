"""The notebooks as the tests see them: cells, tags, and the parts of an exercise."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


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
    """The lesson's two digits, or "" for an appendix."""
    found = re.match(r"(\d\d)_", path.name)
    return found[1] if found else ""


def tagged(path: Path, tag: str) -> list[Cell]:
    return [cell for cell in cells(path) if tag in cell.tags]


def exercise_ids(path: Path) -> list[str]:
    return [
        tag.removeprefix("exercise-")
        for cell in cells(path)
        for tag in cell.tags
        if tag.startswith("exercise-")
    ]


def solution(path: Path, exercise_id: str) -> str:
    """The Python code inside the folded solution of an exercise."""
    (cell,) = tagged(path, f"solution-{exercise_id}")
    blocks = re.findall(r"```python\n(.*?)```", cell.source, flags=re.DOTALL)
    return "\n".join(blocks)
