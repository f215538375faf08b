"""What a class handed in: the learner, the lesson, and the code cells of each answer.

Learners' folders can contain anything: pipes, broken links, folders named like notebooks, names in
other encodings. None of that may keep the others from being judged.
"""

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from teaching import lessons
from vgpu.units import format_bytes

LARGEST_BYTES = 64 * 2**20
"""The size limit for a notebook, including its outputs."""


@dataclass(frozen=True)
class Learner:
    """What one learner handed in: the newest copy of each lesson, with the course's original."""

    who: str
    copies: list[tuple[Path, Path]]
    """(the learner's notebook, the course's lesson), in the order of the lessons."""
    others: list[str]
    """Names of files that look like answers but can't be read."""


def handed_in(folder: Path) -> list[Learner]:
    """Return who handed in what; each folder in ``folder`` is a learner.

    Raises ValueError if ``folder`` doesn't exist, or if nobody handed in a lesson.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; it should have one folder per learner")
    entries = sorted(folder.iterdir())
    learners = [_learner(path) for path in entries if os.path.isdir(path)]
    if not any(learner.copies for learner in learners):
        zips = [path.name for path in entries if path.suffix == ".zip"]
        zips += [name for learner in learners for name in learner.others if name.endswith(".zip")]
        advice = f"; unpack {printable(zips[0])}, for example" if zips else ""
        raise ValueError(
            f"{folder} has no folder with a lesson (such as 04_dataparallel_shapes.ipynb){advice}"
        )
    return learners


def _learner(folder: Path) -> Learner:
    originals = {lessons.number(path): path for path in (*lessons.NOTEBOOKS, lessons.EXAM)}
    newest: dict[str, tuple[float, Path]] = {}
    others = []
    # os.walk skips folders that it can't read, and doesn't follow symbolic links to folders.
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            found = re.search(r"(?<!\d)(\d\d)_.*\.ipynb$", name)
            if name.endswith(".zip"):
                others.append(name)
            if not found or found[1] not in originals or ".ipynb_checkpoints" in Path(place).parts:
                continue
            path = Path(place, name)
            changed_s = _changed_s(path)
            if changed_s is None:
                others.append(name)
            elif found[1] not in newest or changed_s >= newest[found[1]][0]:
                newest[found[1]] = changed_s, path
    copies = [(newest[number][1], originals[number]) for number in sorted(newest)]
    return Learner(printable(folder.name, kept=""), copies, others)


def _changed_s(path: Path) -> float | None:
    """Return when a file was last modified; None for anything else, such as a pipe."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime if stat.S_ISREG(found.st_mode) else None


def answers(notebook: Path, lesson: Path) -> dict[str, list[str]]:
    """Return each exercise's code cells in a learner's copy of ``lesson``.

    An answer consists of all code cells between an exercise's statement and its check, found by
    tag, or by id if a tool has dropped the tags. An exercise whose cells are missing is left out.
    Raises ValueError for a file that isn't a notebook.
    """
    try:
        if notebook.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"it is larger than {format_bytes(LARGEST_BYTES)}")
        cells = json.loads(notebook.read_text(encoding="utf-8-sig"))["cells"]
        found = {name: _answer(cells, lesson, name) for name in lessons.exercise_ids(lesson)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{notebook.name} is not a notebook: {error}") from error
    return {name: cells for name, cells in found.items() if any(map(str.strip, cells))}


def _answer(cells: list[dict], lesson: Path, exercise_id: str) -> list[str]:
    begin, end = (_place(cells, lesson, f"{part}-{exercise_id}") for part in ("exercise", "check"))
    if begin is None or end is None:
        return []
    given = {cell.source for cell in lessons.tagged(lesson, f"given-{exercise_id}")}
    sources = ("".join(c["source"]) for c in cells[begin:end] if c["cell_type"] == "code")
    return [code for code in sources if code not in given]


def _place(cells: list[dict], lesson: Path, tag: str) -> int | None:
    (original,) = lessons.tagged(lesson, tag)
    for index, cell in enumerate(cells):
        if tag in cell.get("metadata", {}).get("tags", ()) or cell.get("id") == original.id:
            return index
    return None


def printable(text: str, kept: str = "\n\t") -> str:
    """Escape all characters that are neither printable nor in ``kept``.

    This includes control characters, lone surrogates, and bytes of a file name that aren't UTF-8.
    The result is safe for any terminal or file.
    """
    return "".join(c if c.isprintable() or c in kept else _spelled_out(c) for c in text)


def _spelled_out(character: str) -> str:
    # Python represents an undecodable byte in a file name, such as 0xfc, as the surrogate 0xdcfc.
    return ascii(character)[1:-1].replace("\\udc", "\\x")
