"""The course as a whole: its routes, its lessons (read from the notebooks), and your progress."""

import json
import re
from pathlib import Path

from helpers.checks import exercises, guesses, records
from helpers.course.sections import core_and_whole, source
from vgpu.tables import Table

# Each route's name and audience, and its lessons ("old code" is the appendix); an empty tuple means
# all of them.
ROUTES = (
    ("quick: the shortest way from one GPU to many", ("00", "01", "04", "06", "07", "12")),
    ("old code, from before 2018", ("02", "03", "04", "05", "old code")),
    (
        "large models: too large for one GPU",
        ("06", "07", "08", "11", "12", "13", "14", "15", "16", "17", "18"),
    ),
    ("everything, in order", ()),
)


def overview(folder: Path | str = ".") -> Table:
    """Return a table of the lessons in ``folder``: minutes, prerequisites, exercises, guesses.

    The caption says where to continue. Appendices come last. Raises FileNotFoundError for a folder
    without lessons.
    """
    paths = _lessons(folder)
    paths += sorted(Path(folder).glob("appendix_*.ipynb"))
    done, guessed = records.solved(), guesses.counts()
    rows, links = [], {}
    for path in paths:
        opening = source(json.loads(path.read_text(encoding="utf-8"))["cells"][0])
        heading = opening.partition("\n")[0].removeprefix("# ")
        own = [e.id for e in exercises() if f"{int(e.id.split('.')[0]):02}_" == path.name[:3]]
        known = opening.partition("**You should know**")[2]
        needed = ", ".join(sorted(set(re.findall(r"lesson (\d\d)", known)))) or "nothing"
        solved = f"{sum(name in done for name in own)} of {len(own)}" if own else ""
        core, whole = core_and_whole(path)
        count, right = guessed.get(path.name[:2], (0, 0))
        hits = f"{right} of {count}" if count else ""
        rows.append((heading, core, whole, needed, solved, hits))
        links[heading] = path.name
    header = (
        *("lesson", "core, minutes", "everything, minutes"),
        *("builds on", "exercises solved", "guesses right"),
    )
    return Table(header, rows, caption=go_on(), links=links)


def routes(folder: Path | str = ".") -> Table:
    """Return a table of routes through the lessons in ``folder``, and how long they take.

    Missing lessons are left out. Raises FileNotFoundError as ``overview`` does.
    """
    minutes_of = {path.name[:2]: core_and_whole(path) for path in _lessons(folder)}
    numbered = list(minutes_of)
    if (appendix := Path(folder) / "appendix_old_code.ipynb").exists():
        minutes_of["old code"] = core_and_whole(appendix)
    rows = []
    for name, stops in ROUTES:
        there = [lesson for lesson in stops or numbered if lesson in minutes_of]
        shown = ", ".join(there) if stops else f"{there[0]} to {there[-1]}"
        core, whole = (sum(minutes_of[lesson][i] for lesson in there) / 60 for i in (0, 1))
        rows.append((name, shown, f"{core:.1f}", f"{whole:.1f}"))
    return Table(("route", "lessons", "core, hours", "everything, hours"), rows)


def go_on() -> str:
    """Return a sentence that says where to continue: the first exercise after the last solved."""
    done = records.solved()
    order = exercises()
    reached = max((place for place, item in enumerate(order) if item.id in done), default=-1)
    later = [item for item in order[reached + 1 :] if item.id not in done]
    if not later:
        left = [item.id for item in order if item.id not in done]
        return f"Still open: {', '.join(left)}." if left else "Every exercise is solved."
    lesson = int(later[0].id.split(".")[0])
    return f"Continue in lesson {lesson:02d}, with exercise {later[0].id} · {later[0].title}."


def _lessons(folder: Path | str) -> list[Path]:
    paths = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise FileNotFoundError(f"no lessons in {Path(folder).resolve()}: run this in notebooks/")
    return paths
