"""A lesson's core and its optional sections, and the minutes that they take.

A section whose heading cell has the tag ``more`` is optional; JupyterLab shows it collapsed. It
ends at the next heading of the same or a higher level. ``cells`` is a notebook file's list of
cells.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS_A_MINUTE, SECONDS_A_LINE, SECONDS_A_GUESS = 180, 4, 40
COLLAPSED = "jp-MarkdownHeadingCollapsed"
"""JupyterLab's key for a collapsed heading, in its cell's metadata."""


def core(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells outside sections tagged ``more``."""
    kept = []
    level_of_more = 0  # the level of the tagged heading; 0 outside its section
    for cell in cells:
        heading = re.match(r"(#+) ", source(cell)) if cell["cell_type"] == "markdown" else None
        if heading and (not level_of_more or len(heading[1]) <= level_of_more):
            level_of_more = len(heading[1]) if "more" in tags(cell) else 0
        if not level_of_more:
            kept.append(cell)
    return kept


def minutes(cells: Sequence[dict[str, Any]]) -> float:
    """Estimate the minutes for prose, code and guesses, plus the minutes that exercises list.

    Hints and solutions don't count.
    """
    words = lines = guesses = stated = 0
    for cell in cells:
        text = source(cell)
        if cell["cell_type"] == "code":
            lines += sum(bool(line.strip()) for line in text.splitlines())
            guesses += len(re.findall(r"\bguess\(", text))
        elif not any(tag.startswith(("hint-", "solution-")) for tag in tags(cell)):
            words += len(text.split())
            stated += sum(map(int, re.findall(r"\*\*Minutes:\*\* (\d+)", text)))
    seconds = lines * SECONDS_A_LINE + guesses * SECONDS_A_GUESS
    return words / WORDS_A_MINUTE + seconds / 60 + stated


def core_and_whole(path: Path) -> tuple[int, int]:
    """Return the minutes for a lesson's core and for the full lesson, rounded to five minutes."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    near_core, near_whole = (5 * round(minutes(some) / 5) for some in (core(cells), cells))
    return near_core, near_whole


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])
