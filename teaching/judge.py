"""Judges one lesson's answers, in a process of its own that may be ended at any moment.

``teaching.class_check`` starts it and sets its limits. A job comes in as JSON on standard input;
each verdict goes out as a line of JSON, and a line before each exercise says that it has begun.
"""

import json
import linecache
import os
import re
import sys
from pathlib import Path
from typing import Any

from helpers.checks import evaluate
from helpers.checks.core import Outcome
from teaching import lessons


def run_cell(source: str, namespace: dict[str, Any], name: str) -> None:
    """Run a cell's code as a notebook would, with its lines known to tracebacks."""
    # A learner may have left a magic behind; it belongs to IPython, not to the answer.
    source = re.sub(r"^[ \t]*[%!].*$", "", source, flags=re.MULTILINE)
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)


def prepared(path: Path, exercise_id: str) -> dict[str, Any]:
    """The names that an exercise starts with: the lesson's own setup and given cells, run.

    ``path`` is the course's lesson, not the learner's copy.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in (*lessons.tagged(path, "setup"), *lessons.tagged(path, f"given-{exercise_id}")):
        run_cell(cell.source, namespace, cell.id)
    return namespace


def outcome_of(
    path: Path, exercise_id: str, answer: str, namespace: dict[str, Any] | None = None
) -> Outcome:
    """The verdict on an answer's code, asked for as the course's own check cell does."""
    namespace = prepared(path, exercise_id) if namespace is None else namespace
    run_cell(answer, namespace, f"exercise {exercise_id}")
    return evaluate(exercise_id, eval(lessons.answer_expression(path, exercise_id), namespace))


def main() -> None:
    job = json.load(sys.stdin)
    limit(job["memory_bytes"])
    # Verdicts go where an answer's prints cannot.
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "r+") as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    path = lessons.ROOT / "notebooks" / job["lesson"]
    for exercise_id, answer in job["answers"].items():
        namespace = prepared(path, exercise_id)
        print(json.dumps({"begun": exercise_id}), file=verdicts)
        try:
            outcome = outcome_of(path, exercise_id, answer, namespace)
            verdict = {"status": outcome.status, "message": str(outcome)}
        except BaseException as error:  # an answer may raise SystemExit, or anything
            verdict = {"status": "error", "message": f"{type(error).__name__}: {error}"}
        print(json.dumps({"exercise": exercise_id, **verdict}), file=verdicts)
    verdicts.flush()
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
    main()
