"""Write the exam sheet to hand out: without solutions, and without what's only for teachers.

    python -m teaching.exam build/99_exam.ipynb

Learners put it next to the lessons' notebooks. ``make class`` judges it like a lesson.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from teaching import lessons

JUDGED_LATER = "# Save the notebook and hand it in: your answer is judged then."


def sheet(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the exam as learners get it, as a new dictionary (nbformat 4)."""
    made = json.loads(json.dumps(notebook))
    kept = []
    for cell in made["cells"]:
        parts = {tag.partition("-")[0] for tag in cell["metadata"].get("tags", ())}
        if parts & {"solution", "teacher"}:
            continue
        if "check" in parts:
            cell["source"] = [JUDGED_LATER]
        kept.append(cell)
    made["cells"] = kept
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teaching.exam", description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path, help="a new file, such as build/99_exam.ipynb")
    target = parser.parse_args(arguments).target
    if target.exists():
        sys.exit(f"exam: {target} already exists: choose another name, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = sheet(lessons.raw(lessons.EXAM))
    target.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{target}: {len(lessons.exercise_ids(lessons.EXAM))} tasks")


if __name__ == "__main__":
    main()
