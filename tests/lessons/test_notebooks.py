"""Rules for lessons' notebooks, checked without running them."""

import ast
import re
from itertools import pairwise

import pytest

from teaching import lessons

CELL_ID = re.compile(r"^[a-z0-9][a-z0-9-]*$")
EXERCISE_PARTS = ("exercise", "stub", "check", "hint", "solution")

each_lesson = pytest.mark.parametrize("path", lessons.NOTEBOOKS, ids=lambda path: path.stem)


def code(path):
    return [cell for cell in lessons.cells(path) if cell.is_code]


def prose(path):
    return [cell for cell in lessons.cells(path) if not cell.is_code]


def headings(source):
    """Return the heading levels in a Markdown cell, ignoring fenced code."""
    bare = re.sub(r"```.*?```", "", source, flags=re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#{1,6}) ", bare, flags=re.MULTILINE)]


def test_the_lessons_are_numbered_from_00_without_gaps():
    numbers = [lessons.number(path) for path in lessons.NOTEBOOKS if lessons.number(path)]
    assert numbers and numbers == [f"{index:02d}" for index in range(len(numbers))]


@each_lesson
def test_no_outputs_are_committed(path):
    for cell in lessons.raw(path)["cells"]:
        assert not cell.get("outputs"), f"cell {cell.get('id')} has outputs"
        assert cell.get("execution_count") is None, f"cell {cell.get('id')} has a count"
    assert "widgets" not in lessons.raw(path)["metadata"], (
        "the notebook contains saved widget state"
    )


@each_lesson
def test_cell_ids_are_readable_and_unique(path):
    ids = [cell.id for cell in lessons.cells(path)]
    assert len(ids) == len(set(ids))
    bad = [name for name in ids if not CELL_ID.match(name)]
    assert not bad, f"ids must be lowercase words joined by dashes: {bad}"


@each_lesson
def test_every_lesson_has_one_title_and_headings_in_order(path):
    levels = [level for cell in prose(path) for level in headings(cell.source)]
    assert levels and levels[0] == 1 and levels.count(1) == 1, "there must be one H1, at the top"
    for above, below in pairwise(levels):
        assert below <= above + 1, f"a heading jumps from level {above} to {below}"


@each_lesson
def test_every_lesson_opens_with_its_goals_and_closes_with_a_summary(path):
    (opening,) = lessons.tagged(path, "opening")
    (closing,) = lessons.tagged(path, "closing")
    assert opening == lessons.cells(path)[0]
    for phrase in ("**You will be able to**", "**Time:**", "**You should know**"):
        assert phrase in opening.source, f"the opening lacks {phrase}"
    assert re.search(r"\*\*Time:\*\* about \d+ minutes", opening.source)
    assert re.search(r"^\|.*\|\n\|[-| :]+\|", closing.source, re.MULTILINE), "no summary table"
    assert "**Read on**" in closing.source
    first_code = code(path)[0]
    assert "setup" in first_code.tags, "the first code cell must be the setup"
    if lessons.number(path):  # an appendix need not use a device
        shown = "devices.describe(" in "".join(cell.source for cell in code(path)[:3])
        assert shown, "the opening must show what this machine will use"


@each_lesson
def test_links_within_a_lesson_and_to_others_work(path):
    text = "\n".join(cell.source for cell in prose(path))
    # JupyterLab creates a heading's anchor from its text, with dashes for spaces.
    places = {name.replace(" ", "-") for name in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\((#[^)]+|[\w.]+\.ipynb)\)", text):
        if target.startswith("#"):
            assert target[1:] in places, f"no heading for {target}"
        else:
            assert (path.parent / target).exists(), f"no notebook {target}"


@each_lesson
def test_a_lesson_with_an_explorer_mentions_it_in_its_opening(path):
    explorers = any(re.search(r"^\w+_explorer\(", cell.source, re.M) for cell in code(path))
    opening = lessons.cells(path)[0].source
    if explorers and lessons.number(path):
        assert re.search(r"\*\*What if\*\* .*\[The explorer\]\(#", opening)


@each_lesson
def test_code_cells_are_short(path):
    sizes = {cell.id: len(cell.source.splitlines()) for cell in code(path)}
    long = {name: size for name, size in sizes.items() if size > 20}
    assert not long, f"code cells over 20 lines: {long}"
    # Stubs, setups and checks count, too: a lesson is read a few lines at a time.
    assert sorted(sizes.values())[len(sizes) // 2] <= 9, f"the median cell is too long: {sizes}"


@each_lesson
def test_prose_is_short_and_close_to_the_code(path):
    for cell in prose(path):
        text = re.sub(r"```.*?```|^\|.*$|https?://\S+", "", cell.source, flags=re.DOTALL | re.M)
        words = len(text.split())
        assert words <= 150, f"{cell.id} has {words} words"
    run = 0
    for cell in lessons.cells(path):
        run = run + 1 if cell.is_code else 0
        assert run <= 3, f"{cell.id} is the fourth code cell in a row without prose"


@each_lesson
def test_figures_have_prose_next_to_them(path):
    cells = lessons.cells(path)
    for index, cell in enumerate(cells):
        if cell.is_code and ("plt.show()" in cell.source or "plots." in cell.source):
            assert "figure" in cell.tags, f"{cell.id} draws a figure but lacks the tag 'figure'"
            neighbors = cells[max(index - 1, 0) : index + 2]
            assert any(not near.is_code for near in neighbors), f"{cell.id} has no prose next to it"


@each_lesson
def test_every_exercise_has_all_its_cells(path):
    ids = lessons.exercise_ids(path)
    own = str(int(lessons.number(path))) if lessons.number(path) else ""
    assert ids == [f"{own}.{index}" for index in range(1, len(ids) + 1)]
    if own and own != "0":
        assert 3 <= len(ids) <= 5, f"a lesson has 3 to 5 exercises, found {ids}"
    for name in ids:
        parts = [lessons.tagged(path, f"{part}-{name}") for part in EXERCISE_PARTS]
        assert all(len(part) == 1 for part in parts), f"exercise {name} lacks one of its parts"
        statement, stub, check, hint, solution = (part[0] for part in parts)
        assert re.search(r"\*\*Difficulty:\*\* [1-5] of 5", statement.source)
        assert re.search(r"\*\*Minutes:\*\* \d+", statement.source)
        assert re.search(r"raise NotImplementedError|\.\.\.", stub.source)
        assert f'check("{name}",' in check.source
        for folded in (hint, solution):
            assert folded.source.count("<details>") == folded.source.count("</details>") == 1
            assert "<summary>" in folded.source
        assert lessons.solution(path, name), f"exercise {name} has no code in its solution"


@each_lesson
def test_code_cells_parse_and_download_nothing(path):
    for cell in code(path):
        plain = re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.MULTILINE)
        ast.parse(plain)
        assert "raises-exception" not in cell.tags, f"{cell.id}: use expected_error instead"
        for word in ("download=True", "weights=", "urlopen", "requests.", "!pip", "%pip"):
            assert word not in cell.source, f"{cell.id} would download something: {word}"
        # torch imports optional packages that may warn, such as an old pynvml.
        assert "-W error" not in cell.source, (
            f"{cell.id}: turn warnings into errors after the imports"
        )
