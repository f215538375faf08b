"""The learner's progress: which exercises are solved.

There's one small file per exercise, so two open notebooks can't overwrite each other's
progress. All files stay on this computer, in the user's data folder or, if it's set, in
COURSE_PROGRESS_DIR.
"""

import os
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import platformdirs

from vgpu.tables import Table

_SOLVED_SUFFIX, GUESS_SUFFIX = ".solved", ".guess"


def folder() -> Path:
    """Return the folder for progress, which may not exist yet."""
    chosen = os.environ.get("COURSE_PROGRESS_DIR")
    return Path(chosen) if chosen else platformdirs.user_data_path("multi-gpu-pytorch-hands-on")


def record_solved(exercise_id: str) -> str:
    """Record an exercise as solved; return a sentence if that failed, otherwise ""."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        (folder() / f"{exercise_id}{_SOLVED_SUFFIX}").write_text(stamp + "\n", encoding="utf-8")
    except OSError as error:
        return (
            f"Your answer is right, but it could not be saved in {folder()} ({error.strerror}). "
            "Set COURSE_PROGRESS_DIR to a folder that you can write to."
        )
    return ""


def solved() -> set[str]:
    """Return the ids of the exercises solved so far."""
    return {path.name.removesuffix(_SOLVED_SUFFIX) for path in folder().glob(f"*{_SOLVED_SUFFIX}")}


def reset() -> None:
    """Delete all progress, including guesses, and print how many exercises were solved."""
    count = len(solved())
    for suffix in (_SOLVED_SUFFIX, GUESS_SUFFIX):
        for path in folder().glob(f"*{suffix}"):
            path.unlink(missing_ok=True)
    print(f"Cleared {count} solved exercise{'' if count == 1 else 's'}.")


def solved_by_lesson(all_ids: list[str]) -> Table:
    """Return a table of which exercises in ``all_ids`` are solved, by lesson."""
    done = solved()
    by_lesson: dict[int, list[str]] = defaultdict(list)
    for name in all_ids:
        by_lesson[int(name.split(".")[0])].append(name)
    rows = [
        (
            f"{lesson:02d}",
            f"{sum(name in done for name in names)} of {len(names)}",
            "  ".join(f"{name} {'✓' if name in done else '·'}" for name in names),
        )
        for lesson, names in sorted(by_lesson.items())
    ]
    return Table(("lesson", "solved", "exercises"), rows)
