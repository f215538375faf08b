"""What is remembered of a learner: the exercises solved, and minutes spent in each lesson.

One small file an exercise, so that two notebooks open at once cannot overwrite each other's progress,
and for each lesson a line of seconds for each cell that ran. All of it stays on this computer, in the
user's own data folder, or in the one that the environment variable COURSE_PROGRESS_DIR names.
"""

import os
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import platformdirs
from IPython import get_ipython

from vgpu.tables import Table

_SOLVED_SUFFIX, _MINUTES_SUFFIX, GUESS_SUFFIX = ".solved", ".minutes", ".guess"
# Between two cells: reading and thinking count; lunch does not.
LONGEST_S = 300.0


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
            f"Your answer is right, but it could not be noted in {folder()} ({error.strerror}). "
            "Set COURSE_PROGRESS_DIR to a folder that you may write to."
        )
    return ""


def solved() -> set[str]:
    """Ids of the exercises solved so far."""
    return {path.name.removesuffix(_SOLVED_SUFFIX) for path in folder().glob(f"*{_SOLVED_SUFFIX}")}


def reset() -> None:
    """Forget all progress, minutes and guesses included; says how many exercises were forgotten."""
    count = len(solved())
    for suffix in (_SOLVED_SUFFIX, _MINUTES_SUFFIX, GUESS_SUFFIX):
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


class _Clock:
    """Adds the time since the last cell, each time that one has run."""

    def __init__(self, lesson: str) -> None:
        self.lesson = lesson
        self.last_s = time.monotonic()

    def __call__(self, *_: object) -> None:
        now_s = time.monotonic()
        gap_s, self.last_s = now_s - self.last_s, now_s
        if gap_s > LONGEST_S:
            return
        try:
            folder().mkdir(parents=True, exist_ok=True)
            path = folder() / f"{self.lesson}{_MINUTES_SUFFIX}"
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{gap_s:.1f}\n")
        except OSError:
            # ``check`` reports a folder that cannot be written, once.
            return


def count_minutes() -> bool:
    """Count the minutes of the lesson that runs in this kernel; says whether it is one.

    Jupyter names the notebook in the environment of its kernels. Elsewhere, as under nbmake,
    nothing is counted.
    """
    shell = get_ipython()
    lesson = Path(os.environ.get("JPY_SESSION_NAME", "")).name[:2]
    if shell is None or not lesson.isdigit():
        return False
    callbacks = shell.events.callbacks["post_run_cell"]
    if not any(isinstance(callback, _Clock) for callback in callbacks):
        shell.events.register("post_run_cell", _Clock(lesson))
    return True


def minutes() -> dict[str, float]:
    """Minutes by lesson, as "04", for the lessons that were begun."""
    return {
        path.name.removesuffix(_MINUTES_SUFFIX): _sum_s(path) / 60
        for path in folder().glob(f"*{_MINUTES_SUFFIX}")
    }


def _sum_s(path: Path) -> float:
    # A line may be half written where a kernel was killed.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return sum(float(line) for line in lines)
