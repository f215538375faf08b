"""Run one learner's answers to a lesson and check them, in a process that can be killed.

``teaching.judging`` starts it in a folder with a file ``job``. For each exercise, a file
``<id>.begun`` appears there, then ``<id>.verdict``: the status, a line break, the message.

A check calls what the answer defines, so both run in this process, and an answer could forge its
verdict. The process reads no notebook, so it has no solution.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from helpers.checks import evaluate
from helpers.checks.core import Outcome
from teaching import guard, lessons
from teaching.cells import Shell
from vgpu.launch.rank import as_if_fresh

LONGEST_MESSAGE = 2000
"""The maximum length of a verdict's message; an error may contain a whole tensor."""


@dataclass(frozen=True)
class Task:
    """One exercise and a learner's answer: everything needed for judging, without the solution."""

    exercise: str
    before: list[tuple[str, str]]
    """(cell id, source) of the course's own setup and given cells, run before the answer."""
    answer: list[str]
    """The answer's code cells."""
    expression: str
    """What the course's check cell passes to ``check``."""


def task(lesson: Path, exercise_id: str, answer: str | Sequence[str]) -> Task:
    """Return the task for an answer, which is one or more cells.

    ``lesson`` is the course's notebook, not the learner's copy.
    """
    before = (*lessons.tagged(lesson, "setup"), *lessons.tagged(lesson, f"given-{exercise_id}"))
    return Task(
        exercise_id,
        [(cell.id, cell.source) for cell in before],
        [answer] if isinstance(answer, str) else list(answer),
        lessons.answer_expression(lesson, exercise_id),
    )


def outcome_of(lesson: Path, exercise_id: str, answer: str | Sequence[str]) -> Outcome:
    """Return the verdict on an answer, judged in this process; raise what its cells raise."""
    main_module = sys.modules["__main__"]
    try:
        shell = Shell({"__name__": "__main__"})
        todo = task(lesson, exercise_id, answer)
        _prepare(todo, shell)
        return _outcome(todo, shell)
    finally:
        sys.modules["__main__"] = main_module  # a shell replaces the program's main module


def _prepare(todo: Task, shell: Shell) -> None:
    for cell_id, source in todo.before:
        try:
            shell.run(source, cell_id)
        except BaseException as error:
            raise RuntimeError(f"the lesson's cell {cell_id} failed: {_text(error)}") from error


def _outcome(todo: Task, shell: Shell) -> Outcome:
    failed: BaseException | None = None
    for number, cell in enumerate(todo.answer, start=1):
        where = f", cell {number}" if len(todo.answer) > 1 else ""
        try:
            shell.run(cell, f"exercise {todo.exercise}{where}")
        except BaseException as error:
            # In a notebook, the cell below can still be run, and so can the check.
            failed = failed or error
    try:
        outcome = evaluate(todo.exercise, eval(todo.expression, shell.user_ns))
    except BaseException as error:
        raise failed or error from None
    if failed and outcome.status != "right":
        raise failed
    return outcome


def _text(error: BaseException) -> str:
    """Return an error's type and message; its own ``__str__`` may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message can't be read"


def main(folder: Path) -> NoReturn:
    guard.enter()
    as_if_fresh()
    job = json.loads((folder / "job").read_text(encoding="utf-8"))
    _limit_files(job["memory_bytes"])
    with open(os.devnull, "r+") as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    pid = os.getpid()
    # There's one shell for the lesson, so later answers can use names from earlier ones.
    shell = Shell({"__name__": "__main__"})
    for fields in job["tasks"]:
        todo = Task(**fields)
        try:
            _prepare(todo, shell)
            (folder / f"{todo.exercise}.begun").touch()
            outcome = _outcome(todo, shell)
            verdict = f"{outcome.status}\n{outcome}"
        except BaseException as error:  # an answer may raise SystemExit, or anything else
            verdict = f"error\n{_text(error)}"
        if os.getpid() != pid:
            os._exit(0)  # this is a fork that the answer made, not the judge
        text = verdict[:LONGEST_MESSAGE].encode("utf-8", errors="backslashreplace")
        (folder / "verdict").write_bytes(text)
        # Rename the file once it's written, so that whoever waits for it finds it complete.
        os.replace(folder / "verdict", folder / f"{todo.exercise}.verdict")
    # Threads that an answer left running must not keep the process alive.
    os._exit(0)


def _limit_files(size_bytes: int) -> None:
    """Limit the size of files that this process and its children write (POSIX).

    Core dumps are disabled, too.
    """
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
