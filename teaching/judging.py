"""Judge one learner's answers to a lesson in a separate process, under time and memory limits."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from teaching import guard, lessons
from teaching.judge import Task
from vgpu.units import format_bytes

POLL_S = 0.1
# Loading PyTorch and running a lesson's own setup don't count toward the learner's time.
PREPARE_S = 300.0
END_S = 10.0
"""How long a process may take to end when it's asked to; then it's killed."""
STOPPED = "not judged"
FROM_A_CHECK = ("right", "wrong", "not attempted", "error")


@dataclass(frozen=True)
class Limits:
    """One exercise's limits: seconds of wall time, and bytes of memory (child processes count)."""

    time_s: float = 120.0
    memory_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class Judged:
    """The verdict on one answer."""

    exercise: str
    status: str
    message: str
    ended: bool = False
    """Whether the process has ended: the answer ended it, or exceeded a limit."""


def judged(tasks: Sequence[Task], limits: Limits, stop: threading.Event) -> Iterator[Judged]:
    """Yield a verdict for each task, in order, until ``stop`` is set.

    After an answer that ends the process or exceeds a limit, a new process continues. It first
    reruns the earlier answers, since later ones may use names from them.
    """
    left, earlier, alone = list(tasks), list[Task](), False
    while left and not stop.is_set():
        before = [] if alone else earlier
        with _started([*before, *left], limits, stop) as process:
            for task in (*before, *left):
                verdict = process.verdict(task.exercise)
                if verdict.status == STOPPED:
                    return
                if verdict.ended:
                    break
                if task in left:
                    left.remove(task)
                    earlier, alone = [task] if alone else [*earlier, task], False
                    yield verdict
        if not verdict.ended:
            return
        if task not in left:
            earlier = []  # an earlier answer ended the process when it was rerun
        elif verdict.status == "error" and earlier and not alone:
            alone = True  # an earlier answer may have ended it: try again without earlier ones
        else:
            left.remove(task)
            alone = False
            yield verdict


@contextmanager
def _started(tasks: list[Task], limits: Limits, stop: threading.Event) -> Iterator["_Process"]:
    """Start a process that judges these tasks; it and its descendants end with the context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "home").mkdir()
        job = {"tasks": [asdict(task) for task in tasks], "memory_bytes": limits.memory_bytes}
        (folder / "job").write_text(json.dumps(job), encoding="utf-8")
        watched = _Process(folder, limits, stop)
        try:
            yield watched
        finally:
            watched.end()


def _environment(home: Path) -> dict[str, str]:
    # Pass on only those of the teacher's variables that answers need.
    wanted = ("PATH", "LANG", "LD_LIBRARY_PATH", "SYSTEMROOT", "VGPU_DEVICES")
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    return kept | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "COURSE_PROGRESS_DIR": str(home),
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        # An answer may contain "%pip install": don't install anything into the teacher's Python.
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(lessons.ROOT),
    }


class _Process:
    """The process of ``teaching.judge`` and everything it starts, watched from outside."""

    def __init__(self, folder: Path, limits: Limits, stop: threading.Event) -> None:
        self._folder, self._limits, self._stop = folder, limits, stop
        # This file has no name, so that no answer can replace it with a pipe. end() closes it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "teaching.judge", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            cwd=folder / "home",
            env=_environment(folder / "home"),
            start_new_session=True,  # the teacher's process handles Ctrl-C
        )
        self._family: set[psutil.Process] = set()
        """The process and all descendants seen so far, including those whose parent has exited."""

    def verdict(self, exercise: str) -> Judged:
        begun, written = (self._folder / f"{exercise}.{end}" for end in ("begun", "verdict"))
        # If the lesson's own cells fail, the verdict says so, and no answer has started.
        status, message = self._wait_for((begun, written), PREPARE_S)
        if not status:
            status, message = self._wait_for((written,), self._limits.time_s)
        if status:
            return Judged(exercise, status, message, ended=True)
        with written.open("rb") as file:
            text = file.read(2**16).decode(errors="replace")
        status, _, message = text.partition("\n")
        if status not in FROM_A_CHECK:
            status, message = "error", "the answer overwrote its verdict"
        return Judged(exercise, status, message)

    def _wait_for(self, files: Sequence[Path], limit_s: float) -> tuple[str, str]:
        """Wait until one of the files exists; return ("", "") or a failure's status and message."""
        deadline_s = time.monotonic() + limit_s
        while True:
            over = self._process.poll() is not None
            if any(path.is_file() for path in files):
                return "", ""
            if over:
                return "error", f"the process ended: {self._ending()}"
            if self._stop.is_set():
                return STOPPED, ""
            used_bytes, allowed_bytes = self._memory_bytes(), self._limits.memory_bytes
            if used_bytes > allowed_bytes:
                used, allowed = format_bytes(used_bytes), format_bytes(allowed_bytes)
                return "too much memory", f"used {used}; the limit is {allowed}"
            if time.monotonic() > deadline_s:
                return "too slow", f"did not finish within {limit_s:g} s"
            time.sleep(POLL_S)

    def _ending(self) -> str:
        self._errors.seek(0)
        last = self._errors.read(2**20).decode(errors="replace").strip().splitlines()[-1:]
        return f"exit code {self._process.returncode}" + "".join(f" ({x[:200]})" for x in last)

    def _memory_bytes(self) -> int:
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            self._family |= {top, *top.children(recursive=True)}
        resident_bytes = sum(_of(each, "memory_info", "rss") for each in self._family)
        if resident_bytes <= self._limits.memory_bytes or sys.platform != "linux":
            return resident_bytes
        # Count pages that processes share only once; this takes longer.
        return sum(_of(each, "memory_full_info", "pss") for each in self._family)

    def end(self) -> None:
        self._memory_bytes()  # check one last time which processes exist
        if self._process.poll() is None:
            guard.end(self._process.pid)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for each in self._family:
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(self._family, timeout=END_S)
        self._errors.close()


def _of(process: psutil.Process, method: str, field: str) -> int:
    """Return a process statistic; 0 if the process has exited or belongs to another user."""
    try:
        return int(getattr(getattr(process, method)(), field))
    except psutil.Error:
        return 0
