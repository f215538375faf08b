"""Each lesson's core is short and needs nothing from the rest; openings show the minutes."""

import re

import pytest
from needed_cells import needed

from helpers.course import sections
from teaching import lessons

NUMBERED = [path for path in lessons.NOTEBOOKS if lessons.number(path)]
README = (lessons.ROOT / "README.md").read_text(encoding="utf-8")

each_lesson = pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)


def cells(path):
    return lessons.raw(path)["cells"]


def test_a_section_tagged_more_ends_at_the_next_heading_of_the_same_level():
    def cell(source, *tags, kind="markdown"):
        return {"cell_type": kind, "source": [source], "metadata": {"tags": [*tags]}}

    some = [
        *(cell("# Title"), cell("## A", "more"), cell("### Inner"), cell("x = 1", kind="code")),
        *(cell("## B\n\nfour more words here"), cell("### C", "more"), cell("text")),
        *(cell("### D"), cell("# a comment", kind="code")),
    ]
    kept = [sections.source(cell).split("\n")[0] for cell in sections.core(some)]
    assert kept == ["# Title", "## B", "### D", "# a comment"]
    exercise = cell("**Minutes:** 8", "exercise-1.1")
    solved = cell("word " * 900, "solution-1.1")
    code = cell('guess_1a = guess("1a")\n\nx = 2', kind="code")
    assert sections.minutes([exercise, solved, code]) == pytest.approx(8 + 2 / 180 + 48 / 60)


@each_lesson
def test_cells_tagged_more_are_collapsed_headings(path):
    for cell in cells(path):
        more = "more" in sections.tags(cell)
        assert cell["metadata"].get(sections.COLLAPSED, False) == more, cell["id"]
        if cell["cell_type"] == "markdown":
            text = re.sub(r"```.*?```", "", sections.source(cell), flags=re.DOTALL)
            headings = re.findall(r"^#+ ", text, re.MULTILINE)
            assert not more or text.startswith("#"), f"{cell['id']} has no heading to collapse"
            assert len(headings) <= 1, f"{cell['id']}: a heading must be at the top of its cell"
        else:
            assert not more, f"{cell['id']} is not a heading"


@each_lesson
def test_the_core_takes_at_most_35_minutes(path):
    took = sections.minutes(sections.core(cells(path)))
    assert took <= 35, f"{took:.1f} minutes: tag a section `more`, or shorten the text"


def test_the_cores_of_lessons_00_to_15_take_at_most_nine_hours():
    whole = sum(sections.minutes(sections.core(cells(path))) for path in NUMBERED[:16])
    assert whole <= 9 * 60, f"{whole / 60:.1f} hours"


def test_the_readme_and_the_openings_show_the_minutes():
    rows = re.findall(r"\(notebooks/(.*)\) \| (\d+) \| (\d+) \| ", README)
    shown = {name: (int(core), int(whole)) for name, core, whole in rows}
    computed = {path.name: sections.core_and_whole(path) for path in lessons.NOTEBOOKS}
    assert shown == computed
    for path in lessons.NOTEBOOKS:
        core, whole = computed[path.name]
        said = f"about {core} minutes" + (f", or {whole} with *more*" if whole > core else "")
        line = re.search(r"^\*\*Time:\*\* (.*)$", lessons.cells(path)[0].source, re.MULTILINE)[1]
        assert line.startswith(said), f"{path.name}: write {said!r}, not {line!r}"


@each_lesson
def test_a_lesson_has_at_most_five_guesses(path):
    asked = [re.findall(r"\bguess\(", cell.source) for cell in lessons.cells(path) if cell.is_code]
    assert sum(map(len, asked)) <= 5, "keep only guesses about an idea"


@each_lesson
def test_a_core_uses_nothing_from_the_rest_of_its_lesson(path):
    kept = {cell["id"] for cell in sections.core(cells(path))}
    code = [cell for cell in lessons.cells(path) if cell.is_code]
    for place, cell in enumerate(code):
        if cell.id in kept:
            lacking = {each.id for each in needed(code[: place + 1])} - kept
            assert not lacking, f"{cell.id} needs {lacking}"
