"""One learner's lesson in a process of its own, within limits of time and memory."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from helpers.units import format_bytes
from teaching import lessons

LOOK_EVERY_S = 0.1
# Loading PyTorch and running a lesson's own setup is not the learner's time.
PREPARE_S = 300.0


@dataclass(frozen=True)
class Limits:
    """What one exercise may take: seconds of wall time, and bytes of memory with its children."""

    time_s: float = 120.0
    memory_bytes: int = 4 * 2**30


def judged(lesson: Path, todo: dict[str, str], limits: Limits) -> Iterator[tuple[str, str, str]]:
    """Judge answers, given as code by exercise id: id, status and message of each, as they come.

    An exercise that breaks a limit or ends the process is the last one that is told.
    """
    todo = dict(todo)
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            [sys.executable, "-m", "teaching.judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=_environment(scratch, mark),
            start_new_session=True,
            text=True,
        )
        try:
            job = {"lesson": lesson.name, "answers": todo, "memory_bytes": limits.memory_bytes}
            lines = _follow(process, json.dumps(job))
            current, running = next(iter(todo)), False
            while todo:
                time_s = limits.time_s if running else PREPARE_S
                allowed = Limits(time_s, limits.memory_bytes)
                line, broken = _next_line(lines, process, mark, allowed)
                if line is None:
                    yield current, *(broken or ("error", f"the process ended: {_code(process)}"))
                    return
                told = json.loads(line)
                if "begun" in told:
                    current, running = told["begun"], True
                else:
                    running = False
                    del todo[told["exercise"]]
                    yield told["exercise"], told["status"], told["message"]
        finally:
            _end(process, mark)


def _environment(scratch: str, mark: str) -> dict[str, str]:
    # No variable of the teacher's that an answer need not see.
    wanted = ("PATH", "LANG", "LD_LIBRARY_PATH", "SYSTEMROOT", "COURSE_DEVICES")
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    return kept | {
        "HOME": scratch,
        "TMPDIR": scratch,
        "COURSE_PROGRESS_DIR": scratch,
        "COURSE_JUDGE": mark,
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(lessons.ROOT),
    }


def _follow(process: subprocess.Popen, job: str) -> "queue.Queue[str | None]":
    lines: queue.Queue[str | None] = queue.Queue()
    stdin, stdout = process.stdin, process.stdout
    assert stdin and stdout

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        stdin.write(job)
        stdin.close()
    except BrokenPipeError:
        lines.put(None)
    return lines


def _next_line(
    lines: "queue.Queue[str | None]", process: subprocess.Popen, mark: str, limits: Limits
) -> tuple[str | None, tuple[str, str] | None]:
    """The next line of the process; or None, and the limit that was broken where one was."""
    deadline = time.monotonic() + limits.time_s
    while time.monotonic() < deadline:
        try:
            return lines.get(timeout=LOOK_EVERY_S), None
        except queue.Empty:
            used = sum(_memory(each) for each in _family(process, mark))
            if used > limits.memory_bytes:
                allowed, took = format_bytes(limits.memory_bytes), format_bytes(used)
                return None, ("too much memory", f"took {took}; {allowed} are allowed")
    return None, ("too slow", f"was not done after {limits.time_s:g} s")


def _family(process: subprocess.Popen, mark: str) -> list[psutil.Process]:
    """The process and all that it started, those that went their own ways included."""
    family = []
    for each in psutil.process_iter():
        try:
            if each.pid == process.pid or each.environ().get("COURSE_JUDGE") == mark:
                family.append(each)
        except psutil.Error:
            continue
    return family


def _memory(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def _end(process: subprocess.Popen, mark: str) -> None:
    while family := [each for each in _family(process, mark) if each.is_running()]:
        for each in family:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()
        psutil.wait_procs(family, timeout=1)
    for stream in (process.stdin, process.stdout):
        if stream and not stream.closed:
            stream.close()


def _code(process: subprocess.Popen) -> str:
    return f"exit code {process.wait()}"
