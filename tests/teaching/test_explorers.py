"""Explorers on the site: every answer is stored, and a sample of them matches the function."""

import html.parser
from itertools import product

import nbformat
import pytest
from levels import ALL

from teaching import lessons, rendered
from teaching.answers import ANSWERS
from teaching.pages import explorers

SETUP = "%matplotlib inline\nfrom helpers.widgets.ring import ring_explorer, show_ring"
# The sample has the first and last value of each control, and a step past the end.
SAMPLE = [(2, 0), (2, 3), (3, 1), (4, 0), (4, 6)]
COMPARED = list(product((2, 3, 4), range(7))) if ALL else SAMPLE


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    """A lesson that runs the ring explorer, then its function for some of the 3 × 7 settings."""
    calls = [f"show_ring({ranks}, {step})" for ranks, step in COMPARED]
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, "ring_explorer()", *calls)]
    folder = tmp_path_factory.mktemp("explorers")
    path = folder / "99_explorer.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return rendered.run(path, folder / "cache")


@pytest.fixture
def found(lesson):
    return lesson.cells[1].outputs[-1].data[ANSWERS][0]


def _shown(outputs):
    return [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/html"]
        for output in outputs
    ]


def test_the_page_has_the_functions_answer_for_every_combination(lesson, found):
    labels = [control["label"] for control in found["controls"]]
    assert labels == ["ranks", "step"]
    values = [control["values"] for control in found["controls"]]
    assert values == [["2", "3", "4"], [str(step) for step in range(7)]]
    assert len(found["answers"]) == 3 * 7
    for (ranks, step), cell in zip(COMPARED, lesson.cells[2:], strict=True):
        answer = found["answers"][explorers.place((ranks - 2, step), (3, 7))]
        parts = [found["parts"][part] for part in answer]
        assert _shown(parts) == _shown(cell.outputs), cell.source
    assert len(found["parts"]) == 2 * (3 + 5 + 7), "steps past the end must share one answer"


def test_controls_have_labels_and_each_picture_is_stored_as_one_file(lesson, found, tmp_path):
    page = _Page()
    page.feed(explorers.explorer(found, tmp_path, "a-0"))
    controls = [of for tag, of in page.tags if tag in ("input", "select")]
    labeled = [of["for"] for tag, of in page.tags if tag == "label"]
    assert [of["id"] for of in controls] == labeled and len(set(labeled)) == 2
    assert [(of["max"], of["value"], of["aria-valuetext"]) for of in controls] == [
        ("2", "2", "4"),
        ("6", "0", "0"),
    ]
    pictures = [of for tag, of in page.tags if tag == "img"]
    assert all(of["alt"] for of in pictures)
    named = {of["src"].removeprefix("_static/explorers/") for of in pictures}
    assert named == {path.name for path in tmp_path.iterdir()}
    assert len(named) == 3 + 5 + 7 and len(pictures) == len(named) + 1, (
        "only the first answer may occur twice"
    )


def test_the_explorer_replaces_its_first_picture(lesson, tmp_path):
    cell = nbformat.from_dict(lesson.cells[1])
    _, words = _shown(cell.outputs[:2])
    assert explorers.put_in_page(cell, tmp_path) == 21
    (output,) = cell.outputs
    first, _, templates = output.data["text/html"].partition("<template>")
    assert words in first and "4 chunks of its own" in words
    assert first.count("<img") == 1 and templates.count("<img") == 15
    assert rendered.LIVE_ONLY not in output.data["text/html"]
    plain = nbformat.from_dict(lesson.cells[2])
    assert explorers.put_in_page(plain, tmp_path) == 0 and plain == lesson.cells[2]


def test_menus_and_single_values_are_labeled(tmp_path):
    controls = [
        {"label": "over <a>", "values": ["x & y", "z"], "now": 1, "slider": False},
        {"label": "GPU", "values": ["H100"], "now": 0, "slider": False},
    ]
    parts = [{"output_type": "stream", "name": "stdout", "text": text} for text in ("<1>", "2")]
    found = {"controls": controls, "parts": parts, "answers": [[0], [1]], "seconds": 0.0}
    text = explorers.explorer(found, tmp_path, "b-0")
    assert "<option>x &amp; y</option><option selected>z</option>" in text
    assert "<p><span>GPU</span> <output>H100</output></p>" in text
    assert '<div class="explorer-answer" aria-live="polite"><pre>2</pre></div>' in text
    assert "<template><pre>&lt;1&gt;</pre></template>" in text
    assert not list(tmp_path.iterdir())


def test_every_lesson_that_imports_an_explorer_shows_one():
    for path in lessons.NOTEBOOKS:
        imports = [cell for cell in lessons.cells(path) if "helpers.widgets" in cell.source]
        shown = [c for c in lessons.cells(path) if c.is_code and "_explorer(" in c.source]
        assert bool(imports) == bool(shown), path.name


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
