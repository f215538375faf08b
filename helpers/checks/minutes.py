"""Your own minutes in each lesson: the time between the cells that you run, without long breaks.

Kept beside the solved exercises, on this computer only: a line of seconds for each cell that ran.
"""

import os
import time
from pathlib import Path

from IPython import get_ipython

from helpers.checks.solved import MINUTES_SUFFIX, folder

# Reading and thinking count; lunch does not.
LONGEST_S = 300.0


class _Follower:
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
            with (folder() / f"{self.lesson}{MINUTES_SUFFIX}").open("a", encoding="utf-8") as file:
                file.write(f"{gap_s:.1f}\n")
        except OSError:
            # A folder that cannot be written is told when an exercise is solved, once.
            return


def follow() -> bool:
    """Count the minutes of the lesson that runs in this kernel; says whether it is one.

    Jupyter names the notebook in the environment of its kernels. Elsewhere, as under nbmake,
    nothing is counted.
    """
    shell = get_ipython()
    lesson = Path(os.environ.get("JPY_SESSION_NAME", "")).name[:2]
    if shell is None or not lesson.isdigit():
        return False
    known = shell.events.callbacks["post_run_cell"]
    if not any(isinstance(callback, _Follower) for callback in known):
        shell.events.register("post_run_cell", _Follower(lesson))
    return True


def spent() -> dict[str, float]:
    """Minutes by lesson, as "04", for the lessons that were begun."""
    return {
        path.name.removesuffix(MINUTES_SUFFIX): _sum_s(path) / 60
        for path in folder().glob(f"*{MINUTES_SUFFIX}")
    }


def _sum_s(path: Path) -> float:
    # A line may be half written where a kernel was killed.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return sum(float(line) for line in lines)
