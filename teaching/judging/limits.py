"""One learner's lesson in a process of its own, within limits of time and memory."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from teaching import lessons
from teaching.judging import judges
from vgpu.launch import guard
from vgpu.units import format_bytes

LOOK_EVERY_S = 0.1
# Loading PyTorch and running a lesson's own setup is not the learner's time.
PREPARE_S = 300.0
END_S = 10.0
"""For the processes of a lesson to be gone once they are killed."""

_MOST_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one exercise may take: seconds of wall time, and bytes of memory with its children."""

    time_s: float = 120.0
    memory_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class Judged:
    """What became of one answer."""

    exercise: str
    status: str
    message: str
    survived: bool = True
    """Whether the process could go on; else this is the last that it judged."""


class NotPrepared(Exception):
    """The process ended, or the lesson's own cells failed, before an exercise began."""


class Stopped(Exception):
    """Nothing more is to be judged."""


def judged(
    lesson: Path,
    todo: dict[str, list[str]],
    earlier: dict[str, list[str]],
    limits: Limits,
    stop: threading.Event,
) -> Generator[Judged, None, None]:
    """Judge answers, given as cells by exercise id, one after the other, as they come.

    Later ones may use the names of those in ``earlier``, which have been judged. The answer that
    breaks a limit or ends the process is the last one. Raises NotPrepared, and Stopped once ``stop``
    is set.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        judge = _Judge(lesson, todo, earlier, limits, Path(folder), stop)
        try:
            for name in todo:
                judge.wait_for_begin(name)
                yield (verdict := judge.wait_for_verdict(name))
                if not verdict.survived:
                    return
        finally:
            judge.end()


class _Judge:
    """The process that judges, seen from outside."""

    def __init__(
        self,
        lesson: Path,
        todo: dict[str, list[str]],
        earlier: dict[str, list[str]],
        limits: Limits,
        folder: Path,
        stop: threading.Event,
    ) -> None:
        self.limits = limits
        self._stop = stop
        self._mark = uuid.uuid4().hex
        self._reports = folder / "reports"
        self._read = 0
        self._waiting: deque[dict[str, object]] = deque()
        self._errors = folder / "errors"
        (folder / "home").mkdir()
        job = {
            "lesson": lesson.relative_to(lessons.ROOT).as_posix(),
            "answers": todo,
            "earlier": earlier,
            "memory_bytes": limits.memory_bytes,
            "reports": str(self._reports),
        }
        (folder / "job").write_text(json.dumps(job), encoding="utf-8")
        self.process = judges.started(folder, self._mark)

    def wait_for_begin(self, name: str) -> None:
        for report in self._news(time.monotonic() + PREPARE_S):
            if report.get("begun") == name:
                return
            if "not prepared" in report:
                raise NotPrepared(str(report["not prepared"]))
        if self.process.poll() is None:
            raise NotPrepared(f"the lesson's own cells were not done after {PREPARE_S:g} s")
        raise NotPrepared(f"{self._ending()} before the exercise began")

    def wait_for_verdict(self, name: str) -> Judged:
        for report in self._news(time.monotonic() + self.limits.time_s):
            if report.get("exercise") == name:
                return Judged(name, str(report.get("status")), str(report.get("message")))
            used = self._memory_bytes()
            if used > self.limits.memory_bytes:
                allowed, took = format_bytes(self.limits.memory_bytes), format_bytes(used)
                message = f"took {took}; {allowed} are allowed"
                return Judged(name, "too much memory", message, survived=False)
        if self.process.poll() is None:
            message = f"was not done after {self.limits.time_s:g} s"
            return Judged(name, "too slow", message, survived=False)
        return Judged(name, "error", self._ending(), survived=False)

    def _news(self, deadline_s: float) -> Iterator[dict[str, object]]:
        """Reports as they come, {} at each look without one; until the deadline or the end."""
        ended = False
        while time.monotonic() < deadline_s and not ended:
            # What was written before the end is read after it.
            ended = self.process.poll() is not None
            self._waiting += self._new_reports()
            if not self._waiting and not ended:
                if self._stop.is_set():
                    raise Stopped
                time.sleep(LOOK_EVERY_S)
            while self._waiting:
                yield self._waiting.popleft()
            yield {}

    def _new_reports(self) -> Iterator[dict[str, object]]:
        """What the judge has written since the last look; an answer may have added anything."""
        if not self._reports.is_file():
            return
        with self._reports.open("rb") as file:
            file.seek(self._read)
            text = file.read(_MOST_AT_ONCE)
        lines, end, rest = text.rpartition(b"\n")
        # A line that has come in part is read again; one of this length is none of ours.
        self._read += len(text) if len(rest) == _MOST_AT_ONCE else len(lines) + len(end)
        for line in lines.splitlines():
            try:
                report = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(report, dict):
                yield report

    def _ending(self) -> str:
        code = self.process.wait()
        last = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
        return f"the process ended: exit code {code}" + "".join(f" ({line[:200]})" for line in last)

    def _memory_bytes(self) -> int:
        family = self._family(everywhere=not guard.ADOPTS)
        resident = sum(_each(each, lambda p: p.memory_info().rss) for each in family)
        if resident <= self.limits.memory_bytes or sys.platform != "linux":
            return resident
        # Pages that several processes share count once. It takes longer to find out.
        return sum(_each(each, lambda p: p.memory_full_info().pss) for each in family)

    def _family(self, *, everywhere: bool) -> list[psutil.Process]:
        """The process and all that it started; looked for ``everywhere`` by a variable's value."""
        family: list[psutil.Process] = []
        try:
            process = psutil.Process(self.process.pid)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            everywhere = True
        if everywhere:
            family += [each for each in psutil.process_iter() if self._is_marked(each)]
        return [each for each in set(family) if each.pid != os.getpid()]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(judges.MARK) == self._mark
        except psutil.Error:
            return False

    def end(self) -> None:
        """End the process and all that it has started."""
        if self.process.poll() is None:
            guard.end(self.process.pid)
            _wait(self.process)
        until_s = time.monotonic() + END_S
        while (family := self._family(everywhere=True)) and time.monotonic() < until_s:
            for each in family:
                _each(each, lambda p: p.kill())
            _wait(self.process)
            psutil.wait_procs(family, timeout=1)


def _wait(process: judges.Process) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _each(process: psutil.Process, ask: Callable[[psutil.Process], int | None]) -> int:
    """Ask a process that may have ended, or belong to another user; 0 then."""
    try:
        return ask(process) or 0
    except psutil.Error:
        return 0
