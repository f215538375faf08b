"""How a lesson's cells become slides, and what each keypress reveals."""

import re

import bs4
import nbformat
import pytest

from teaching import lessons, slides


def notebook(*cells):
    made = nbformat.v4.new_notebook()
    for kind, source, *tags in cells:
        new = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        made.cells.append(new(source, metadata={"tags": list(tags)}))
    return made


def test_headings_start_slides_and_answers_are_left_out():
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


def test_the_cells_after_a_prediction_start_a_new_slide():
    made = notebook(
        ("words", "## Two GPUs\n\n**Predict:** how many?"), ("code", "2"), ("code", "3")
    )
    assert slides.slide_types(made) == ["slide", "subslide", "-"]


def test_a_full_slide_continues_below():
    made = notebook(("words", "## Part"), *[("code", "x\n" * 20)] * 3)
    assert slides.slide_types(made) == ["slide", "-", "subslide", "subslide"]


def test_assertions_wait_for_a_separate_keypress():
    made = notebook(
        ("words", "## Part"),
        ("code", "x = f(2)\nprint(x)\nassert x == 4, (\n    'four'\n)\nprint('done')", "claim-A01"),
        ("code", "assert x > 3"),
        ("code", "for y in x:\n    assert y"),
        ("code", "%%bash\nassert this"),
    )
    slides.hold_back_assertions(made)
    assert [cell.source for cell in made.cells[1:]] == [
        "x = f(2)\nprint(x)\nprint('done')",
        "assert x == 4, (\n    'four'\n)",
        "assert x > 3",
        "for y in x:\n    assert y",
        "%%bash\nassert this",
    ]
    assert made.cells[2].metadata.tags == ["claim-A01"]
    assert slides.slide_types(made) == ["slide", "-", "fragment", "fragment", "-", "-"]


def test_prose_after_an_output_does_not_appear_before_it():
    made = notebook(
        ("words", "## Part"), ("code", "6 * 7"), ("words", "It is 42."), ("code", "later"),
        ("words", "## Next"), ("words", "More."),
    )  # fmt: skip
    made.cells[1].outputs = [nbformat.v4.new_output("stream", text="42")]
    assert slides.slide_types(made) == ["slide", "-", "fragment", "-", "slide", "-"]
    page = bs4.BeautifulSoup(slides.as_slides(made, "part"), "html.parser")

    def key(text):
        return page.find(string=re.compile(text)).find_parent(class_="fragment")

    # One keypress for the output, one for the prose, together with what follows it.
    assert page.find_all(class_="fragment") == [key("^42$"), key("It is 42")]
    assert key("later") is key("It is 42") and key("6") is None and key("More") is None


def test_an_output_waits_for_the_next_keypress():
    made = notebook(("words", "## Part"), ("code", "6 * 7"), ("code", "assert 6 * 7 == 42"))
    made.cells[1].outputs = [
        nbformat.v4.new_output("execute_result", data={"text/plain": "the answer"})
    ]
    slides.hold_back_assertions(made)
    text = slides.as_slides(made, "part")
    before, _, after = text.partition('<div class="fragment">')
    assert "6</span>" in before and "the answer" not in before and "the answer" in after
    # The assertion needs one more keypress, after the output.
    assert "assert" not in before and after.index("the answer") < after.index(">assert<")
    assert after.count('class="fragment"') == 1


def test_a_cells_own_slide_type_takes_precedence():
    made = notebook(("words", "## Part"), ("code", "x"))
    made.cells[1].metadata["slideshow"] = {"slide_type": "skip"}
    assert slides.slide_types(made) == ["slide", "skip"]


def test_a_heading_inside_a_cell_starts_a_cell_with_its_own_metadata():
    made = notebook(("words", "The answer.\n\n## Next\n\nWords.", "figure"), ("code", "x"))
    slides.split_at_headings(made)
    assert [cell.source for cell in made.cells] == ["The answer.\n\n", "## Next\n\nWords.", "x"]
    made.cells[0].metadata["slideshow"] = {}
    assert "slideshow" not in made.cells[1].metadata


@pytest.mark.parametrize("path", lessons.NOTEBOOKS, ids=lambda path: path.stem)
def test_every_lesson_starts_with_a_slide_and_gives_no_solution_away(path):
    made = nbformat.read(path, as_version=4)
    slides.split_at_headings(made)
    kinds = slides.slide_types(made)
    assert kinds[0] == "slide"
    shown = [cell for cell, kind in zip(made.cells, kinds, strict=True) if kind != "skip"]
    assert not any("<summary>" in cell.source for cell in shown)
    assert kinds.count("slide") >= 3
