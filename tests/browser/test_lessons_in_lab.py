"""Every lesson in JupyterLab, in a browser: it's opened and run, and its explorer is used."""

import re
import time

import pytest

from teaching import lessons

EXPLORER = re.compile(r"^\w*explorer\(.*\)$", re.MULTILINE)
names = [lessons.number(path) or path.stem for path in lessons.NOTEBOOKS]


@pytest.fixture(scope="module", params=names)
def opened(request, open_lesson):
    """A lesson before anything has been run."""
    return request.param, open_lesson(request.param)


@pytest.fixture(scope="module")
def ran(opened):
    """The same lesson after Run All Cells."""
    name, lesson = opened
    lesson.run_all()
    return name, lesson


def test_hints_and_solutions_are_folded_when_a_lesson_opens(opened):
    _, lesson = opened
    folded = [n for n, cell in enumerate(lesson.cells()) if "<details>" in cell["source"]]
    for index in folded:
        details = lesson.show(index).locator("details")
        details.first.wait_for(timeout=30_000)
        assert not details.evaluate_all("all => all.some(each => each.open)")


def test_the_opening_links_to_the_explorer(opened):
    _, lesson = opened
    link = lesson.show(0).locator("a", has_text="The explorer")
    if not link.count():
        pytest.skip("the lesson has no explorer")
    link.click()
    index = next(n for n, cell in enumerate(lesson.cells()) if EXPLORER.search(cell["source"]))
    lesson.page.wait_for_function(
        "cell => { const box = cell.getBoundingClientRect();"
        " return box.height > 0 && box.top > 0 && box.top < window.innerHeight; }",
        arg=lesson.at(index).element_handle(),
        timeout=60_000,
    )


@pytest.mark.timeout(600)
def test_every_cell_runs_without_errors_or_red_output(ran):
    _, lesson = ran
    for cell in lesson.cells():
        for output in cell["outputs"]:
            assert output["output_type"] != "error", f"{cell['id']}: {output}"
            assert output.get("name") != "stderr", f"{cell['id']}: {output['text']}"


def test_the_explorer_responds_to_its_slider(ran, request):
    name, lesson = ran
    found = [n for n, cell in enumerate(lesson.cells()) if EXPLORER.search(cell["source"])]
    if not found:
        assert name not in ("02", "04", "05", "06", "10", "11", "13"), "the explorer is missing"
        pytest.skip("the lesson has no explorer")
    for index in found:
        area = lesson.show(index).locator(".jp-OutputArea").first
        answer = area.locator(".widget-output").first
        answer.locator("img, table").first.wait_for(timeout=60_000)
        took = request.config.seconds_to_answer.setdefault(name, [])
        for before in range(3):
            shown = answer.inner_html()
            move(area, before)
            started = time.monotonic()
            lesson.page.wait_for_function(
                "([answer, shown]) => answer.querySelector('img, table')"
                " && answer.innerHTML !== shown",
                arg=[answer.element_handle(), shown],
                timeout=60_000,
                polling=20,
            )
            took.append(time.monotonic() - started)


def move(area, turn):
    """Move the first slider with the keyboard; with no slider, choose the next option."""
    handles = area.locator(".noUi-handle")
    if handles.count():
        handle = handles.first
        handle.focus()
        last = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
        handle.press("ArrowLeft" if turn == 1 or last else "ArrowRight")
    else:
        choice = area.locator("select").first
        count = choice.locator("option").count()
        choice.select_option(index=(turn + 1) % count)
