"""Judges one lesson's answers, in a process of its own that may be ended at any moment.

``teaching.judging.limits`` has it started and sets its limits. A job comes in as JSON; each verdict
goes out as a line of JSON, and a line before each exercise says that it has begun.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from helpers.checks import evaluate
from helpers.checks.core import Outcome
from teaching import lessons
from teaching.cells import Shell
from vgpu.launch import guard
from vgpu.launch.rank import as_if_fresh

LONGEST_MESSAGE = 2000
"""Characters of a verdict's message; an error may carry a whole tensor."""


class NotPrepared(Exception):
    """The lesson's own cells failed, through no fault of the answer."""


def prepared(path: Path, exercise_id: str) -> Shell:
    """A shell with the names that an exercise starts with: the lesson's setup and given cells, run.

    ``path`` is the course's lesson, not the learner's copy. Raises NotPrepared.
    """
    shell = Shell({"__name__": "__main__"})
    for cell in (*lessons.tagged(path, "setup"), *lessons.tagged(path, f"given-{exercise_id}")):
        try:
            shell.run(cell.source, cell.id)
        except BaseException as error:
            raise NotPrepared(f"the lesson's cell {cell.id} failed: {said(error)}") from error
    return shell


def outcome_of(path: Path, exercise_id: str, answer: str | Sequence[str]) -> Outcome:
    """The verdict on an answer, one cell or several, asked for as the course's check cell does."""
    main = sys.modules["__main__"]
    try:
        return _outcome(path, exercise_id, answer, prepared(path, exercise_id))
    finally:
        sys.modules["__main__"] = main  # a shell is the program's main module


def _outcome(path: Path, exercise_id: str, answer: str | Sequence[str], shell: Shell) -> Outcome:
    failed: BaseException | None = None
    for cell, name in _named(exercise_id, [answer] if isinstance(answer, str) else answer):
        try:
            shell.run(cell, name)
        except BaseException as error:
            # In a notebook the cell below can still be run, and so can the check.
            failed = failed or error
    try:
        handed_over = eval(lessons.answer_expression(path, exercise_id), shell.user_ns)
        outcome = evaluate(exercise_id, handed_over)
    except BaseException as error:
        raise failed or error from None
    if failed and outcome.status != "right":
        raise failed
    return outcome


def _named(exercise_id: str, answer: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each cell of an answer with a name for tracebacks."""
    for number, cell in enumerate(answer, start=1):
        yield cell, f"exercise {exercise_id}" + (f", cell {number}" if len(answer) > 1 else "")


def said(error: BaseException) -> str:
    """An error's type and message; its own ``__str__`` may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which cannot say more"


class _Judge:
    """Takes the job's answers one after the other; later ones know the names of earlier ones."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.path = lessons.ROOT / job["lesson"]
        self.reports = Path(job["reports"])
        self.names: dict[str, Any] = {}
        self.pid = os.getpid()

    def again(self, exercise_id: str, answer: list[str]) -> None:
        """Run an answer that an earlier process has judged, for the names that it makes."""
        shell = self._shell(exercise_id)
        before = set(shell.user_ns)
        for cell, name in _named(exercise_id, answer):
            try:
                shell.run(cell, name)
            except BaseException:
                continue  # its verdict has been given
        self._keep(shell, before)

    def judge(self, exercise_id: str, answer: list[str]) -> None:
        shell = self._shell(exercise_id)
        before = set(shell.user_ns)
        self.report({"begun": exercise_id})
        try:
            outcome = _outcome(self.path, exercise_id, answer, shell)
            verdict = {"status": outcome.status, "message": str(outcome)}
        except BaseException as error:  # an answer may raise SystemExit, or anything
            verdict = {"status": "error", "message": said(error)}
        if os.getpid() != self.pid:
            os._exit(0)  # the answer has forked, and this is not the judge
        verdict["message"] = verdict["message"][:LONGEST_MESSAGE]
        self.report({"exercise": exercise_id, **verdict})
        self._keep(shell, before)

    def report(self, message: dict[str, str]) -> None:
        # Opened for each line: an answer may close or write to whatever is open.
        line = f"\n{json.dumps(message)}\n".encode()
        descriptor = os.open(self.reports, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line)
        os.close(descriptor)

    def _shell(self, exercise_id: str) -> Shell:
        shell = prepared(self.path, exercise_id)
        for name, value in self.names.items():
            shell.user_ns.setdefault(name, value)
        return shell

    def _keep(self, shell: Shell, before: set[str]) -> None:
        made = {n: v for n, v in shell.user_ns.items() if n not in before and n[:1] != "_"}
        self.names.update(made)


def main(job: dict[str, Any]) -> NoReturn:
    guard.enter(orphaned_s=0.0)  # an answer does not end by itself
    as_if_fresh()
    limit(job["memory_bytes"])
    with open(os.devnull, "r+") as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    judge = _Judge(job)
    try:
        for exercise_id, answer in job["earlier"].items():
            judge.again(exercise_id, answer)
        for exercise_id, answer in job["answers"].items():
            judge.judge(exercise_id, answer)
    except NotPrepared as error:
        judge.report({"not prepared": str(error)[:LONGEST_MESSAGE]})
    # Threads that an answer left running must not keep the process.
    os._exit(0)


def limit(memory_bytes: int) -> None:
    """Bound what the process and each of its children may write and dump, where POSIX has it."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    main(json.load(sys.stdin))
