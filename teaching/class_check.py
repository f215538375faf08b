"""Check a class's exercises: who solved what.

    python -m teaching.class_check handed_in --csv results.csv

``handed_in`` has one folder per learner, with the notebooks anywhere inside it. Each learner's
lesson is judged in its own process, under time and memory limits, which also cover the processes
that it starts. These are limits, not a sandbox: an answer can read files and use the network just
as you can, and it can forge its own verdict; docs/teaching.md says what to do about it.
"""

import argparse
import csv
import io
import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from teaching import lessons
from teaching.handed_in import Learner, answers, handed_in, printable
from teaching.judge import task
from teaching.judging import Limits, judged
from vgpu.launch import launcher

MARKS = {
    "right": "✓",
    "wrong": "✗",
    "error": "!",
    "not attempted": "·",
    "missing": "-",
    "too slow": "T",
    "too much memory": "M",
    "not judged": "?",
}


@dataclass(frozen=True)
class Verdict:
    """One learner's answer to one exercise; ``status`` is a key of ``MARKS``."""

    who: str
    exercise: str
    status: str
    message: str = ""


def judge(
    who: str, notebook: Path, lesson: Path, limits: Limits, stop: threading.Event
) -> list[Verdict]:
    """Return the verdicts on all exercises in one learner's lesson, whatever happens.

    Exercises without a verdict when ``stop`` is set are "not judged".
    """
    ids = lessons.exercise_ids(lesson)
    try:
        found = answers(notebook, lesson)
    except ValueError as error:
        return [Verdict(who, name, "missing", printable(str(error))) for name in ids]
    verdicts = {name: Verdict(who, name, "missing", "its cells are missing") for name in ids}
    for name in found:
        verdicts[name] = Verdict(who, name, "not judged", "stopped before its verdict")
    tasks = [task(lesson, name, cells) for name, cells in found.items()]
    try:
        for result in judged(tasks, limits, stop):
            message = printable(result.message)
            verdicts[result.exercise] = Verdict(who, result.exercise, result.status, message)
    except OSError as error:
        # A full disk, or files that the answer locked: the other learners still need their
        # verdicts.
        message = printable(f"could not be judged: {error}")
        for name in found:
            if verdicts[name].status == "not judged":
                verdicts[name] = Verdict(who, name, "error", message)
    return [verdicts[name] for name in ids]


def check_class(folder: Path, limits: Limits, jobs: int = 1) -> list[Verdict]:
    """Return the verdicts on everything that a class handed in, learner by learner.

    A learner who handed in no lesson gets one verdict, without an exercise. After Ctrl-C, the
    remaining exercises are "not judged". Raises ValueError if nobody handed in a lesson.
    """
    learners = handed_in(folder)
    stop = threading.Event()
    lessons_in = sum(len(each.copies) for each in learners)
    with ThreadPoolExecutor(jobs) as pool:
        work = [
            pool.submit(judge, each.who, copy, lesson, limits, stop)
            for each in learners
            for copy, lesson in each.copies
        ]
        try:
            # Show progress only on a terminal, and on stderr: the table may be redirected.
            for _ in tqdm(as_completed(work), "judged", lessons_in, unit="lesson", disable=None):
                pass
        except KeyboardInterrupt:
            stop.set()
        verdicts = [verdict for done in work for verdict in done.result()]
    return verdicts + [_nothing(each) for each in learners if not each.copies]


def at_once(limits: Limits) -> int:
    """Return how many lessons this machine can judge in parallel, each within its memory limit.

    An answer may start two ranks, so using half the cores keeps the time limit fair.
    """
    by_memory = psutil.virtual_memory().available // limits.memory_bytes
    return max(1, min(launcher.cores() // 2, by_memory))


def _nothing(learner: Learner) -> Verdict:
    message = "no lesson in this folder"
    if learner.others:
        message += f": {printable(learner.others[0])} is not a notebook"
        if learner.others[0].endswith(".zip"):
            message += "; unpack it there and check again"
    return Verdict(learner.who, "", "missing", message)


def table(verdicts: list[Verdict]) -> str:
    """Return a table of marks by learner and exercise, with a count of right answers."""
    ids = {v.exercise for v in verdicts if v.exercise}
    names = sorted(ids, key=lambda name: [*map(int, name.split("."))])
    found = {(v.who, v.exercise): MARKS[v.status] for v in verdicts}
    people = sorted({v.who for v in verdicts})
    width = max(map(len, [*people, "who"]))
    rows = [" ".join(["who".ljust(width), *names, "right"])]
    for who in people:
        marks = [found.get((who, name), " ") for name in names]
        cells = [mark.center(len(name)) for mark, name in zip(marks, names, strict=True)]
        rows.append(" ".join([who.ljust(width), *cells, str(marks.count(MARKS["right"])).rjust(5)]))
    rows.append("")
    rows.append("  ".join(f"{mark} {status}" for status, mark in MARKS.items()))
    return "\n".join(rows)


def write_csv(path: Path, verdicts: list[Verdict]) -> None:
    """Write every verdict as a row, in which no cell can be taken for a formula."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("who", "exercise", "status", "message"))
        for v in verdicts:
            writer.writerow(map(_no_formula, (v.who, v.exercise, v.status, v.message)))


def _no_formula(cell: str) -> str:
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t")) else cell


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="teaching.class_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="the folder with one folder per learner")
    parser.add_argument("--csv", type=Path, help="also write every verdict, with its message")
    positive = _number(float, lambda x: 0 < x < math.inf, "a number above 0")
    count = _number(int, lambda n: n >= 1, "an integer of at least 1")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=Limits.time_s,
        help="time limit per exercise, in seconds",
    )
    parser.add_argument(
        "--gib", type=positive, default=4.0, help="memory limit per exercise, in GiB"
    )
    parser.add_argument(
        "--jobs", type=count, help="lessons judged at once (default: as many as fit)"
    )
    options = parser.parse_args(arguments)
    limits = Limits(options.seconds, int(options.gib * 2**30))
    # A name that this terminal can't encode must not keep the table from being printed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if options.csv:
            options.csv.open("a").close()  # fail now, not after an hour of judging
        verdicts = check_class(options.folder, limits, options.jobs or at_once(limits))
        print(table(verdicts))
        if options.csv:
            write_csv(options.csv, verdicts)
            print(f"{options.csv}: {len(verdicts)} verdicts with their messages")
        left = sum(verdict.status == "not judged" for verdict in verdicts)
        if left:
            sys.exit(f"class_check: stopped; {left} of {len(verdicts)} exercises were not judged")
    except (OSError, ValueError) as error:
        sys.exit(f"class_check: {error}")


def _number(kind: Callable, fits: Callable, expected: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return read


if __name__ == "__main__":
    main()
