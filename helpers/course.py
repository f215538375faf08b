"""The course as a whole: its lessons, read from the notebooks themselves, and how far you are."""

import json
import re
from pathlib import Path

from helpers.checks import exercises
from helpers.checks.solved import ids
from helpers.tables import Table


def overview(folder: Path | str = ".") -> Table:
    """The lessons in ``folder``: minutes, the lessons they build on, and exercises solved.

    Appendices come last. Read from each notebook's opening cell, so it cannot go stale. Raises
    FileNotFoundError for a folder without lessons.
    """
    paths = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise FileNotFoundError(f"no lessons in {Path(folder).resolve()}: run this in notebooks/")
    paths += sorted(Path(folder).glob("appendix_*.ipynb"))
    done = ids()
    rows, links = [], {}
    for path in paths:
        opening = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        heading = _found(r"^# (.*)$", opening)
        own = [e.id for e in exercises() if f"{int(e.id.split('.')[0]):02}_" == path.name[:3]]
        known = opening.partition("**You should know**")[2]
        needed = ", ".join(sorted(set(re.findall(r"lesson (\d\d)", known)))) or "nothing"
        solved = f"{sum(name in done for name in own)} of {len(own)}" if own else ""
        rows.append((heading, _found(r"\*\*Time:\*\* about (\d+)", opening), needed, solved))
        links[heading] = path.name
    return Table(("lesson", "minutes", "builds on", "exercises solved"), rows, links=links)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""
