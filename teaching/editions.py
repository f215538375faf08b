"""Make an edition to hand out, from the same notebooks: without solutions, or solved.

    python -m teaching.editions student build/student.zip
    python -m teaching.editions solved build/solved

Each is a complete course with lessons, package and setup, so ``make lab`` works in it. Tests and
the teacher's tools and guides are left out. The exercises' checks are included, and know the
answers: an edition without solutions keeps honest people honest.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.course import sections
from teaching import lessons

PARTS = (
    *("notebooks", "vgpu", "helpers", "docs", "README.md", "LICENSE"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"),  # the README links to them
    *("Makefile", "find_python.sh", "setup_venv.py", "open_lab.py", ".jupyter"),
    *("pyproject.toml", "environment.yml"),
    *("Dockerfile", ".dockerignore", ".devcontainer", "binder"),
)
# For teachers: timetables, and the answers to the discussion questions.
TEACHERS = ("teaching.md", "discussion.md")
EDITIONS = ("student", "solved")
KEPT_BACK = (
    "<details>\n<summary>Solution</summary>\n\nNot in this edition: ask your teacher.\n\n</details>"
)
# A Markdown link around text or an image, but not the image itself.
_LINK = re.compile(r"(?<!!)\[(?P<text>!\[[^\]]*\]\([^)]*\)|[^\[\]]*)\]\((?P<target>[^)\s]*)\)")
# What the README says about tools that only a clone has.
_OF_A_CLONE = re.compile(r"<!-- clone -->.*?<!-- /clone -->", re.DOTALL)
START = """# {title}

You need Python 3.11 or newer and, on Linux and macOS, make. In this folder:

- Linux and macOS: `make lab`
- Windows: `py setup_venv.py`, then `.venv\\Scripts\\python open_lab.py`

The first run downloads the packages. After that, JupyterLab starts right away.

{note}
"""
NOTES = {
    "student": "Write your answers in the cells marked for them, save, and hand in the `notebooks` "
    "folder. The solutions and the tests stay with the teacher.",
    "solved": "Each exercise's cell contains its solution. The tests stay with the teacher.",
}


def edition(notebook: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a lesson's notebook (an nbformat 4 dictionary) in one of ``EDITIONS``, as a copy.

    In the student edition, a solution is replaced with a note that the teacher has it; in the
    solved one, an exercise's cell contains the solution. Cells keep their ids and tags.
    """
    made = json.loads(json.dumps(notebook))
    for cell in made["cells"]:
        for tag in cell["metadata"].get("tags", ()):
            part, _, exercise_id = tag.partition("-")
            if kind == "student" and part == "solution":
                cell["source"] = KEPT_BACK.splitlines(keepends=True)
            if kind == "solved" and part == "stub":
                solution = _solution(notebook, exercise_id)
                cell["source"] = solution.strip().splitlines(keepends=True)
    return made


def _core_alone(cells: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return a lesson's core, with plain text in place of links to what's left out."""
    kept = sections.core(cells)
    prose = [sections.source(cell) for cell in kept if cell["cell_type"] == "markdown"]
    headings = re.findall(r"^#+ (.*)$", "\n".join(prose), re.MULTILINE)
    places = {"#" + heading.replace(" ", "-") for heading in headings}

    def text_or_link(link: re.Match[str]) -> str:
        target = link["target"]
        there = ":" in target or target in places or (folder / target).is_file()
        return link[0] if there else link["text"]

    for cell in kept:
        if cell["cell_type"] == "markdown":
            text = _LINK.sub(text_or_link, sections.source(cell))
            text = re.sub(r"(\*\*Time:\*\* .*), or \d+ with \*more\*", r"\1", text)
            cell["source"] = text.splitlines(keepends=True)
    return kept


def _solution(notebook: dict[str, Any], exercise_id: str) -> str:
    for cell in notebook["cells"]:
        if f"solution-{exercise_id}" in cell["metadata"].get("tags", ()):
            return lessons.python_in("".join(cell["source"]))
    raise ValueError(f"exercise {exercise_id} has a stub but no solution")


def _trim(readme: Path) -> None:
    """Cut what needs a clone, and lessons and folders that aren't in this edition."""
    text = re.sub(r"\n{3,}", "\n\n", _OF_A_CLONE.sub("", readme.read_text(encoding="utf-8")))
    for name in re.findall(r"^\| \[.*\]\((notebooks/.*\.ipynb)\) \| ", text, re.MULTILINE):
        if not (readme.parent / name).exists():
            text = re.sub(rf"^\| .*\({re.escape(name)}\).*\n", "", text, flags=re.MULTILINE)
    before, fence, tree = text.partition("## Repository layout\n\n```\n")
    listed, end, after = tree.partition("```")
    kept, parent = [], readme.parent
    for line in listed.splitlines(keepends=True):
        name = line.split()[0]
        if not line.startswith(" "):
            parent = readme.parent / name
        place = parent / name if line.startswith(" ") else parent
        if any(place.parent.glob(place.name)):
            kept.append(line)
    readme.write_text(before + fence + "".join(kept) + end + after, encoding="utf-8")


def _unlink(folder: Path) -> None:
    """Replace links to files that are left out with their text; remove badges for them."""
    for page in [*folder.glob("*.md"), *folder.glob("docs/*.md")]:

        def kept(link: re.Match[str], page: Path = page) -> str:
            text, target = link["text"], link["target"]
            if ":" in target or (page.parent / target.partition("#")[0]).exists():
                return link[0]
            return "" if text.startswith("!") else text

        page.write_text(_LINK.sub(kept, page.read_text(encoding="utf-8")), encoding="utf-8")


def write(kind: str, target: Path, cores_of: Sequence[str] = ()) -> int:
    """Write an edition to a new folder, or to a zip file if ``target`` ends in .zip.

    With ``cores_of``, such as ("00", "04"), the edition has only the cores of these lessons.
    Returns the number of exercises in the edition. Raises FileExistsError if the target exists, so
    that nobody's answers are overwritten.
    """
    if target.exists():
        raise FileExistsError(f"{target} already exists: choose another name, or remove it first")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "multi-gpu-pytorch"
        folder.mkdir()
        for part in PARTS:
            source = lessons.ROOT / part
            if source.is_dir():
                unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", *TEACHERS)
                shutil.copytree(source, folder / part, ignore=unwanted)
            else:
                shutil.copy2(source, folder / part)
        count = 0
        for path in sorted((folder / "notebooks").glob("*.ipynb")):
            if cores_of and lessons.number(path) not in cores_of:
                path.unlink()
        for path in sorted((folder / "notebooks").glob("*.ipynb")):
            notebook = edition(json.loads(path.read_text(encoding="utf-8")), kind)
            if cores_of:
                notebook["cells"] = _core_alone(notebook["cells"], path.parent)
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")
            count += len(lessons.exercise_ids(path))
        _trim(folder / "README.md")
        _unlink(folder)
        title = "Multi-GPU PyTorch, hands on" + (", solved" if kind == "solved" else "")
        start = START.format(title=title, note=NOTES[kind])
        (folder / "START.md").write_text(start, encoding="utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".zip":
            shutil.make_archive(str(target.with_suffix("")), "zip", scratch)
        else:
            shutil.move(folder, target)
    return count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teaching.editions", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=EDITIONS, help="without solutions, or solved")
    parser.add_argument("target", type=Path, help="a new folder, or a file that ends in .zip")
    options = parser.parse_args(arguments)
    try:
        count = write(options.kind, options.target)
    except FileExistsError as error:
        sys.exit(f"editions: {error}")
    print(
        f"{options.target}: {len(lessons.NOTEBOOKS)} notebooks, {count} exercises, {options.kind}"
    )


if __name__ == "__main__":
    main()
