"""What goes on which slide, decided from a lesson's cells."""

import nbformat
import pytest

from teaching import lessons, slides


def notebook(*cells):
    made = nbformat.v4.new_notebook()
    for kind, source, *tags in cells:
        new = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        made.cells.append(new(source, metadata={"tags": list(tags)}))
    return made


def test_headings_begin_slides_and_answers_are_left_out():
    made = notebook(
        ("words", "# 04 · A lesson", "opening"),
        ("code", "import torch", "setup"),
        ("words", "## Part\n\nWords."),
        ("code", "x = 1"),
        ("words", "### Exercise", "exercise-4.1"),
        ("code", "...", "stub-4.1"),
        ("code", 'check("4.1", ...)', "check-4.1"),
        ("words", "hint", "hint-4.1"),
        ("words", "solution", "solution-4.1"),
    )
    kinds = slides.slide_types(made)
    assert kinds == ["slide", "skip", "slide", "-", "-", "-", "skip", "skip", "skip"]


def test_what_follows_a_prediction_waits_on_its_own_slide():
    made = notebook(
        ("words", "## Two GPUs\n\n**Predict:** how many?"), ("code", "2"), ("code", "3")
    )
    assert slides.slide_types(made) == ["slide", "subslide", "-"]


def test_a_full_slide_goes_on_below():
    made = notebook(("words", "## Part"), *[("code", "x\n" * 20)] * 3)
    assert slides.slide_types(made) == ["slide", "-", "subslide", "subslide"]


def test_a_cells_own_slide_type_decides():
    made = notebook(("words", "## Part"), ("code", "x"))
    made.cells[1].metadata["slideshow"] = {"slide_type": "skip"}
    assert slides.slide_types(made) == ["slide", "skip"]


def test_a_heading_inside_a_cell_begins_a_cell_with_its_own_metadata():
    made = notebook(("words", "The answer.\n\n## Next\n\nWords.", "figure"), ("code", "x"))
    slides.split_at_headings(made)
    assert [cell.source for cell in made.cells] == ["The answer.\n\n", "## Next\n\nWords.", "x"]
    made.cells[0].metadata["slideshow"] = {}
    assert "slideshow" not in made.cells[1].metadata


@pytest.mark.parametrize("path", lessons.NOTEBOOKS, ids=lambda path: path.stem)
def test_every_lesson_begins_with_a_slide_and_gives_no_solution_away(path):
    made = nbformat.read(path, as_version=4)
    slides.split_at_headings(made)
    kinds = slides.slide_types(made)
    assert kinds[0] == "slide"
    shown = [cell for cell, kind in zip(made.cells, kinds, strict=True) if kind != "skip"]
    assert not any("<summary>" in cell.source for cell in shown)
    assert kinds.count("slide") >= 3
