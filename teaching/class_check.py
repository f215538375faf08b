"""Checks the exercises of a whole class: who, which, right or not.

    python -m teaching.class_check handed_in --csv results.csv

``handed_in`` holds a folder for each learner, with the notebooks anywhere inside it. Each learner's
lesson is judged in a process of its own, within limits of time and memory, and the processes that
it starts count with it. These are limits, not a prison: an answer can still read files and use the
network as you can. Judge strangers' work as a user without rights, or in a container.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from teaching import lessons
from teaching.limits import Limits, judged

MARKS = {
    "right": "✓",
    "wrong": "✗",
    "error": "!",
    "not attempted": "·",
    "missing": "-",
    "too slow": "T",
    "too much memory": "M",
}


@dataclass(frozen=True)
class Verdict:
    """One learner's answer to one exercise; ``status`` is a key of ``MARKS``."""

    who: str
    exercise: str
    status: str
    message: str = ""


def answers(notebook: Path, lesson: Path) -> dict[str, str]:
    """The code that a learner's copy of a lesson holds for each exercise of ``lesson``.

    An answer is every code cell between an exercise's statement and its check, found by tag, or by
    id where a tool has dropped the tags. An exercise whose cells are gone is left out. Raises
    ValueError for a file that is no notebook.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        found = {name: _answer(cells, lesson, name) for name in lessons.exercise_ids(lesson)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{notebook} is not a notebook: {error}") from error
    return {name: code for name, code in found.items() if code.strip()}


def _answer(cells: list[dict], lesson: Path, exercise_id: str) -> str:
    begin, end = (_place(cells, lesson, f"{part}-{exercise_id}") for part in ("exercise", "check"))
    if begin is None or end is None:
        return ""
    given = {cell.source for cell in lessons.tagged(lesson, f"given-{exercise_id}")}
    sources = ("".join(c["source"]) for c in cells[begin:end] if c["cell_type"] == "code")
    return "\n\n".join(code for code in sources if code not in given)


def _place(cells: list[dict], lesson: Path, tag: str) -> int | None:
    (original,) = lessons.tagged(lesson, tag)
    for index, cell in enumerate(cells):
        if tag in cell.get("metadata", {}).get("tags", ()) or cell.get("id") == original.id:
            return index
    return None


def handed_in(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Who handed in which notebook, and the course's lesson it belongs to.

    A learner is a folder in ``folder``. The newest copy of a lesson counts. Raises ValueError where
    there is no folder, or none with a lesson in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; it should hold a folder for each learner")
    originals = {lessons.number(path): path for path in lessons.NOTEBOOKS if lessons.number(path)}
    nobody = True
    for learner in sorted(path for path in folder.iterdir() if path.is_dir()):
        newest: dict[str, Path] = {}
        for path in sorted(learner.rglob("*.ipynb"), key=lambda path: path.stat().st_mtime):
            found = re.search(r"(?<!\d)(\d\d)_", path.name)
            if found and found[1] in originals and ".ipynb_checkpoints" not in path.parts:
                newest[found[1]] = path
        for number, path in sorted(newest.items()):
            nobody = False
            yield learner.name, path, originals[number]
    if nobody:
        raise ValueError(f"{folder} has no folder with a lesson (as 04_dataparallel_shapes.ipynb)")


def judge(who: str, notebook: Path, lesson: Path, limits: Limits) -> list[Verdict]:
    """The verdicts on all exercises of one learner's lesson."""
    ids = lessons.exercise_ids(lesson)
    try:
        waiting = answers(notebook, lesson)
    except ValueError as error:
        return [Verdict(who, name, "missing", str(error)) for name in ids]
    verdicts = {
        name: Verdict(who, name, "missing", "its cells are not in the notebook")
        for name in ids
        if name not in waiting
    }
    # An exercise that breaks a limit ends the process; the others get a new one.
    while waiting:
        for name, status, message in judged(lesson, waiting, limits):
            verdicts[name] = Verdict(who, name, status, message)
            del waiting[name]
    return [verdicts[name] for name in ids]


def check_class(folder: Path, limits: Limits, jobs: int = 1) -> list[Verdict]:
    """The verdicts on everything that a class handed in, learner by learner."""
    work = list(handed_in(folder))
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(lambda item: judge(item[0], item[1], item[2], limits), work)
        return [verdict for verdicts in done for verdict in verdicts]


def table(verdicts: list[Verdict]) -> str:
    """Who and which as a table of marks, with each learner's count of right answers."""
    names = sorted({v.exercise for v in verdicts}, key=lambda name: [*map(int, name.split("."))])
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="teaching.class_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="holds a folder for each learner")
    parser.add_argument("--csv", type=Path, help="also write every verdict, with its message")
    parser.add_argument("--seconds", type=float, default=Limits.time_s, help="for an exercise")
    parser.add_argument("--gib", type=float, default=4.0, help="memory for an exercise")
    parser.add_argument("--jobs", type=int, default=1, help="learners judged at once")
    options = parser.parse_args(arguments)
    limits = Limits(options.seconds, int(options.gib * 2**30))
    try:
        verdicts = check_class(options.folder, limits, options.jobs)
    except ValueError as error:
        sys.exit(f"class_check: {error}")
    print(table(verdicts))
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("who", "exercise", "status", "message"))
            writer.writerows((v.who, v.exercise, v.status, v.message) for v in verdicts)
        print(f"{options.csv}: {len(verdicts)} verdicts with their messages")


if __name__ == "__main__":
    main()
