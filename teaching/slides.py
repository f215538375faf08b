"""Slides for each lesson, made from its cells and their outputs with reveal.js.

    python -m teaching.slides build/slides

Tags and headings determine where a slide starts; ``slide_type`` in a cell's metadata, as set in
JupyterLab's property inspector, overrides that. Setup, checks, hints and solutions are left out. A
cell's output and its assertions each wait for a keypress, so the room can guess first. reveal.js is
copied from sphinx-revealjs, so the slides work without a network.
"""

import argparse
import ast
import importlib.util
import re
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import nbformat
from nbconvert import SlidesExporter

from teaching import lessons, rendered

TEMPLATES = Path(__file__).parent / "templates"
LEFT_OUT = ("setup", "check", "hint", "solution", "given")
# How many lines of code fit on a 1200 x 800 slide, found by trial and error.
LINES_A_SLIDE = 28
FIGURE_LINES = 13
HELD = "held_back"
"""The metadata key of a cell that appears on the next keypress."""


def split_at_headings(notebook: nbformat.NotebookNode) -> None:
    """Split markdown cells before each "## ", so that each section starts on its own slide."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cells.append(cell)
            continue
        parts = [part for part in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE) if part]
        cells += [
            nbformat.v4.new_markdown_cell(part, metadata=deepcopy(cell.metadata)) for part in parts
        ]
    notebook.cells = cells


def hold_back_assertions(notebook: nbformat.NotebookNode) -> None:
    """Move a cell's assertions into a cell after it, because they give away its output.

    Assertions inside a loop or a function stay where they are.
    """
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        lines = cell.source.splitlines()
        found = _assertions(cell.source) if cell.cell_type == "code" else []
        held = [line for first, last in found for line in lines[first - 1 : last]]
        gone = {number for first, last in found for number in range(first, last + 1)}
        kept = [line for number, line in enumerate(lines, 1) if number not in gone]
        if held and any(line.strip() for line in kept):
            cell.source = "\n".join(kept).strip("\n")
            metadata = {"tags": list(cell.metadata.get("tags", ())), HELD: True}
            cells.append(nbformat.v4.new_code_cell("\n".join(held), metadata=metadata))
        elif held:
            cell.metadata[HELD] = True
    notebook.cells = cells


def _assertions(source: str) -> list[tuple[int, int]]:
    """Return each top-level assertion's first and last lines; [] if this isn't plain Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []  # a magic, or a shell command
    return [(n.lineno, n.end_lineno or n.lineno) for n in tree.body if isinstance(n, ast.Assert)]


def slide_types(notebook: nbformat.NotebookNode) -> list[str]:
    """Return each cell's slide type.

    The types are "slide", "subslide" (below the previous slide), "-" (same slide), "fragment" (same
    slide, on the next keypress) and "skip".

    Assertions wait for a keypress, and so does prose after an output on the same slide. Prose and
    the code after it stay together, on a new subslide if they wouldn't fit. What follows a
    "Predict:" is on a new slide, so that the room can guess first.
    """
    types: list[str] = []
    room, predict, shown = 0, False, False
    for index, cell in enumerate(notebook.cells):
        words = cell.cell_type == "markdown"
        lines = _lines(cell)
        # A markdown cell is measured together with the code that follows it.
        block = lines + (_following(notebook.cells, index) if words else 0)
        if chosen := cell.metadata.get("slideshow", {}).get("slide_type"):
            kind = chosen
        elif any(tag.split("-")[0] in LEFT_OUT for tag in cell.metadata.get("tags", ())):
            kind = "skip"
        elif words and "<summary>" in cell.source:
            kind = "skip"  # a folded answer is for those who study alone
        elif words and cell.source.startswith(("# ", "## ")):
            kind = "slide"
        elif predict or (block if words else lines) > room:
            kind = "subslide"
        else:
            # Prose after an output is about that output.
            kind = "fragment" if cell.metadata.get(HELD) or (words and shown) else "-"
        if kind in ("slide", "subslide"):
            room, shown = LINES_A_SLIDE, False
        if kind != "skip":
            room -= lines
            shown = shown or (not words and bool(cell.outputs))
            predict = words and "**Predict:**" in cell.source
        types.append(kind)
    return types


def _following(cells: list[nbformat.NotebookNode], index: int) -> int:
    """Return the lines of the code cell after a markdown cell, at most as many as a slide fits."""
    after = cells[index + 1] if index + 1 < len(cells) else None
    return min(_lines(after), LINES_A_SLIDE) if after and after.cell_type == "code" else 0


def _lines(cell: nbformat.NotebookNode) -> int:
    """Return about how many lines a cell takes on a slide, including its outputs."""
    if cell.cell_type == "markdown":
        return sum(1 + len(line) // 90 for line in cell.source.splitlines() if line.strip()) + 1
    lines = len(cell.source.splitlines()) + 1
    for output in cell.outputs:
        data = output.get("data", {})
        text = output.get("text") or data.get("text/plain", "")
        lines += FIGURE_LINES if "image/png" in data else len(text.splitlines())
    return lines


def write(target: Path, cache: Path) -> list[Path]:
    """Write every lesson's slides as HTML files to ``target``, next to a copy of reveal.js.

    Returns the files. Raises RuntimeError if sphinx-revealjs isn't installed.
    """
    found = importlib.util.find_spec("sphinx_revealjs")
    if not found or not found.origin:
        raise RuntimeError("sphinx-revealjs is not installed: make slides installs it")
    target.mkdir(parents=True, exist_ok=True)
    carried = Path(found.origin).parent / "_static" / "revealjs"
    shutil.copytree(carried, target / "reveal.js", dirs_exist_ok=True)
    written = []
    for path in lessons.NOTEBOOKS:
        print(f"running {path.stem}", flush=True)
        notebook = rendered.run(path, cache)
        split_at_headings(notebook)
        hold_back_assertions(notebook)
        written.append(target / f"{path.stem}.slides.html")
        written[-1].write_text(as_slides(notebook, path.stem), encoding="utf-8")
    return written


def as_slides(notebook: nbformat.NotebookNode, name: str) -> str:
    """Return the page with one lesson's slides; it needs a folder ``reveal.js`` next to it."""
    for cell, kind in zip(notebook.cells, slide_types(notebook), strict=True):
        cell.metadata["slideshow"] = {"slide_type": kind}
    exporter = SlidesExporter(
        template_name="slides",
        extra_template_basedirs=[str(TEMPLATES)],
        reveal_url_prefix="reveal.js",
        reveal_theme="white",
    )
    text, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    return str(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teaching.slides", description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path, help="the slides' folder")
    options = parser.parse_args(arguments)
    try:
        written = write(options.target, lessons.ROOT / "build" / "executed")
    except RuntimeError as error:
        sys.exit(f"slides: {error}")
    print(
        f"{options.target}: {len(written)} lessons; open one in a browser; Escape shows an overview"
    )


if __name__ == "__main__":
    main()
