"""Which exercises were solved: one small file each, in the user's own data folder.

One file an exercise, so that two notebooks open at once cannot overwrite each other's progress.
The environment variable COURSE_PROGRESS_DIR names another folder.
"""

import html
import os
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import platformdirs

_SUFFIX = ".solved"


@dataclass(frozen=True)
class Progress:
    """Solved and existing exercises per lesson; shows itself as a table."""

    solved: dict[int, list[str]]
    exercises: dict[int, list[str]]

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            (f"{lesson:02d}", f"{len(self.solved.get(lesson, []))} of {len(names)}", self._marks(names))
            for lesson, names in sorted(self.exercises.items())
        ]

    def _marks(self, names: list[str]) -> str:
        done = {name for solved in self.solved.values() for name in solved}
        return "  ".join(f"{name} {'✓' if name in done else '·'}" for name in names)

    def __str__(self) -> str:
        rows = [("lesson", "solved", "exercises"), *self._rows()]
        return "\n".join(f"{lesson:<8}{count:<9}{marks}" for lesson, count, marks in rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>"
            + "".join(f"<td style='text-align:left'>{html.escape(c)}</td>" for c in row)
            + "</tr>"
            for row in self._rows()
        )
        return f"<table><tr><th>lesson</th><th>solved</th><th>exercises</th></tr>{rows}</table>"


def folder() -> Path:
    """Where progress is kept; it need not exist yet."""
    chosen = os.environ.get("COURSE_PROGRESS_DIR")
    return Path(chosen) if chosen else platformdirs.user_data_path("multi-gpu-pytorch-hands-on")


def record(exercise_id: str) -> str:
    """Remember an exercise as solved; returns a sentence if that could not be done, else ""."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        (folder() / f"{exercise_id}{_SUFFIX}").write_text(stamp + "\n", encoding="utf-8")
    except OSError as error:
        return (
            f"Your answer is right, but it could not be noted in {folder()} ({error.strerror}). "
            "Set COURSE_PROGRESS_DIR to a folder that you may write to."
        )
    return ""


def ids() -> set[str]:
    """Ids of the exercises solved so far."""
    return {path.name.removesuffix(_SUFFIX) for path in folder().glob(f"*{_SUFFIX}")}


def reset() -> None:
    """Forget all progress; says how many exercises were forgotten."""
    paths = list(folder().glob(f"*{_SUFFIX}"))
    for path in paths:
        path.unlink(missing_ok=True)
    print(f"Forgot {len(paths)} solved exercise{'' if len(paths) == 1 else 's'}.")


def tabulate(all_ids: list[str]) -> Progress:
    """Group the ids of all exercises, and those solved so far, by lesson."""
    done = ids()
    by_lesson: dict[int, list[str]] = defaultdict(list)
    for name in all_ids:
        by_lesson[int(name.split(".")[0])].append(name)
    return Progress(
        {lesson: [n for n in names if n in done] for lesson, names in by_lesson.items()},
        dict(by_lesson),
    )
