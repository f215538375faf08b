"""The course as a whole: its lessons, read from the notebooks themselves, and how far you are."""

import json
import re
from pathlib import Path

from helpers.checks import exercises, guesses, minutes
from helpers.checks.solved import ids
from helpers.tables import Table


def overview(folder: Path | str = ".") -> Table:
    """The lessons in ``folder``: minutes, yours, what they build on, exercises, guesses.

    The caption says where to go on. Appendices come last. Read from each notebook's opening cell,
    so it cannot go stale. Raises FileNotFoundError for a folder without lessons.
    """
    paths = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise FileNotFoundError(f"no lessons in {Path(folder).resolve()}: run this in notebooks/")
    paths += sorted(Path(folder).glob("appendix_*.ipynb"))
    done, spent, guessed = ids(), minutes.spent(), guesses.counts()
    rows, links = [], {}
    for path in paths:
        opening = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        heading = _found(r"^# (.*)$", opening)
        own = [e.id for e in exercises() if f"{int(e.id.split('.')[0]):02}_" == path.name[:3]]
        known = opening.partition("**You should know**")[2]
        needed = ", ".join(sorted(set(re.findall(r"lesson (\d\d)", known)))) or "nothing"
        solved = f"{sum(name in done for name in own)} of {len(own)}" if own else ""
        yours = f"{spent[path.name[:2]]:.0f}" if path.name[:2] in spent else ""
        stated = _found(r"\*\*Time:\*\* about (\d+)", opening)
        made, right = guessed.get(path.name[:2], (0, 0))
        hits = f"{right} of {made}" if made else ""
        rows.append((heading, stated, yours, needed, solved, hits))
        links[heading] = path.name
    header = ("lesson", "minutes", "yours", "builds on", "exercises solved", "guesses right")
    return Table(header, rows, caption=go_on(), links=links)


def go_on() -> str:
    """A sentence that says where to go on: the first exercise after the last one solved."""
    done = ids()
    order = exercises()
    reached = max((place for place, item in enumerate(order) if item.id in done), default=-1)
    later = [item for item in order[reached + 1 :] if item.id not in done]
    if not later:
        left = [item.id for item in order if item.id not in done]
        return f"Still open: {', '.join(left)}." if left else "Every exercise is solved."
    lesson = int(later[0].id.split(".")[0])
    return f"Go on in lesson {lesson:02d}, to exercise {later[0].id} · {later[0].title}."


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""
