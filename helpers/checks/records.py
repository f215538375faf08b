"""What is remembered of a learner: the exercises solved.

One small file an exercise, so that two notebooks open at once cannot overwrite each other's progress.
All of it stays on this computer, in the user's own data folder, or in the one that the environment
variable COURSE_PROGRESS_DIR names.
"""

import os
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import platformdirs

from vgpu.tables import Table

_SOLVED_SUFFIX, GUESS_SUFFIX = ".solved", ".guess"


def folder() -> Path:
    """Where progress is kept; it need not exist yet."""
    chosen = os.environ.get("COURSE_PROGRESS_DIR")
    return Path(chosen) if chosen else platformdirs.user_data_path("multi-gpu-pytorch-hands-on")


def record_solved(exercise_id: str) -> str:
    """Remember an exercise as solved; returns a sentence if that could not be done, else ""."""
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
    """Ids of the exercises solved so far."""
    return {path.name.removesuffix(_SOLVED_SUFFIX) for path in folder().glob(f"*{_SOLVED_SUFFIX}")}


def reset() -> None:
    """Forget all progress, guesses included; says how many exercises were forgotten."""
    count = len(solved())
    for suffix in (_SOLVED_SUFFIX, GUESS_SUFFIX):
        for path in folder().glob(f"*{suffix}"):
            path.unlink(missing_ok=True)
    print(f"Forgot {count} solved exercise{'' if count == 1 else 's'}.")


def solved_by_lesson(all_ids: list[str]) -> Table:
    """Solved exercises per lesson, of all those in ``all_ids``."""
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
