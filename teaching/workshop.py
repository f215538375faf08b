"""A half-day or full-day workshop: the cores of a few lessons, and a page for the teacher.

    python -m teaching.workshop build/workshop

writes ``build/workshop.zip`` to hand out, an edition without solutions, and ``build/workshop.md``
for the teacher: timetables, what to ask, and what goes wrong.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.course import sections
from teaching import editions, lessons

MORNING, AFTERNOON = ("00", "04", "06", "07"), ("09", "11", "12")
MORNING_MINUTES, AFTERNOON_MINUTES = 210, 180
BREAK = "Break"
# What a half day includes in addition to its lessons, in minutes.
FIRST = {
    "morning": ("Everyone has JupyterLab open; what to expect from the day", 15),
    "afternoon": ("Leftovers from the morning; everyone's `progress()`", 5),
}
LAST = ("Everyone says what was new to them; where to go next", 10)

PAGE = """# A half-day or full-day workshop

Hand out `{zip}`. It has the cores of {count} lessons, without solutions; its `START.md` explains \
how to begin. Have everyone run `make lab` at home: only the download needs a network. A laptop \
with two cores and 8 GB is enough.

## The half day

{morning}

## The afternoon

{afternoon}

Each lesson gets about {factor:.1f} times as long as its reading, guesses and exercises take. If \
time runs short, skip an exercise: nothing later needs it.

## How to teach a lesson

Before each surprising cell, a lesson asks for a guess. Have everyone guess, with the buttons or \
by a show of hands, and only then run the next cell. A wrong guess is the best thing that can \
happen: ask whoever made it what they were thinking, and let the next cell answer.

People do exercises alone or in pairs while you walk around. The check tells them what's wrong, \
so you can ask "what does it expect, and what did yours do?"

{parts}
"""


def cores(numbers: Sequence[str]) -> dict[Path, float]:
    """Return these lessons' notebooks, with the minutes that their cores take."""
    paths = [path for path in lessons.NOTEBOOKS if lessons.number(path) in numbers]
    return {path: sections.minutes(sections.core(lessons.raw(path)["cells"])) for path in paths}


def timetable(half: str, numbers: Sequence[str], minutes: int) -> list[tuple[int, int, str]]:
    """Return rows of (start minute, duration, what) that fill ``minutes``.

    The remaining time is divided among the lessons in proportion to their cores, rounded to five
    minutes; the last one takes the remainder. A break comes before each of the last two lessons.
    """
    taken = FIRST[half][1] + LAST[1] + 15 + 10
    left, core = minutes - taken, cores(numbers)
    rows = [FIRST[half]]
    for place, (path, own) in enumerate(core.items()):
        if place >= len(core) - 2:
            rows.append((BREAK, 15 if place == len(core) - 2 else 10))
        given = 5 * round((minutes - taken) * own / sum(core.values()) / 5)
        given = left if place == len(core) - 1 else given
        left -= given
        title = lessons.cells(path)[0].source.partition("\n")[0].removeprefix("# ")
        exercises = [
            tag.removeprefix("exercise-")
            for cell in sections.core(lessons.raw(path)["cells"])
            for tag in sections.tags(cell)
            if tag.startswith("exercise-")
        ]
        plural = "s" if len(exercises) > 1 else ""
        rows.append((f"{title}, with exercise{plural} {' and '.join(exercises)}", given))
    rows.append(LAST)
    starts = [sum(given for _, given in rows[:place]) for place in range(len(rows))]
    return [(start, given, what) for start, (what, given) in zip(starts, rows, strict=True)]


def page(archive: Path) -> str:
    """Return the teacher's page, as Markdown."""
    guide = (lessons.ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
    parts = [
        part.strip()
        for part in re.split(r"^(?=##)", guide, flags=re.MULTILINE)
        if re.match(rf"### (?:{'|'.join(MORNING + AFTERNOON)}) ", part)
    ]
    morning = timetable("morning", MORNING, MORNING_MINUTES)
    lessons_minutes = sum(given for _, given, what in morning if ", with exercise" in what)
    return PAGE.format(
        zip=archive.name,
        count=len(parts),
        morning=_table(morning),
        afternoon=_table(timetable("afternoon", AFTERNOON, AFTERNOON_MINUTES)),
        factor=lessons_minutes / sum(cores(MORNING).values()),
        parts="\n\n".join(parts),
    )


def _table(rows: list[tuple[int, int, str]]) -> str:
    lines = [f"| {start // 60}:{start % 60:02} | {given} | {what} |" for start, given, what in rows]
    return "\n".join(["| time | minutes | what |", "|---|---|---|", *lines])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teaching.workshop", description=__doc__.split("\n")[0])
    parser.add_argument(
        "target", type=Path, help="a path without an extension, such as build/workshop"
    )
    options = parser.parse_args(arguments)
    archive = options.target.with_suffix(".zip")
    try:
        count = editions.write("student", archive, cores_of=MORNING + AFTERNOON)
    except FileExistsError as error:
        sys.exit(f"workshop: {error}")
    options.target.with_suffix(".md").write_text(page(archive), encoding="utf-8")
    print(f"{archive}: {count} exercises; {options.target.with_suffix('.md')}: your page")


if __name__ == "__main__":
    main()
