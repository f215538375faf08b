"""A lesson opens with only its core visible; nothing waits for a guess or gives it away."""

import re

import pytest


@pytest.fixture(scope="module")
def lesson(open_lesson):
    return open_lesson("04", expanded=False)


def index_of(lesson, text):
    (found,) = (n for n, cell in enumerate(lesson.cells()) if text in cell["source"])
    return found


def hidden(lesson):
    return lesson.ask("p => p.content.widgets.map(cell => cell.isHidden)")


def test_more_is_collapsed_when_a_lesson_opens(lesson):
    cells, away = lesson.cells(), hidden(lesson)
    heading = next(n for n, cell in enumerate(cells) if "more" in cell["tags"])
    assert not away[heading] and away[heading + 1], "only what follows the heading must be hidden"
    core = index_of(lesson, 'check("4.1"')
    assert not away[core]
    lesson.command("notebook:expand-all-headings")
    lesson.page.wait_for_timeout(500)
    assert not any(hidden(lesson))


def test_a_typed_guess_opens_its_explanation_and_run_all_does_not_wait_for_it(lesson):
    lesson.run_all()
    asked, met = index_of(lesson, 'guess("4b")'), index_of(lesson, "guess_4b.compare")
    explanation = index_of(lesson, 'class="why-4b"')
    details = lesson.show(explanation).locator("details")
    assert not details.evaluate("each => each.open")
    lesson.show(met).get_by_text("Make guess 4b above").wait_for(timeout=30_000)
    field = lesson.show(asked).locator("input[type=text]")
    field.fill("8 and 9")
    field.press("Enter")
    message = lesson.show(asked).locator(".widget-html", has_text=re.compile("asks for 1 number"))
    message.wait_for(timeout=30_000)
    field.fill("3")
    field.press("Enter")
    lesson.show(met).get_by_text("as you predicted").wait_for(timeout=30_000)
    assert lesson.show(explanation).locator("details").evaluate("each => each.open")


def test_a_guess_with_buttons_can_be_skipped(lesson):
    asked, met = index_of(lesson, 'guess("4e"'), index_of(lesson, "guess_4e.compare")
    buttons = lesson.show(asked).locator("button.jupyter-button")
    assert buttons.all_inner_texts() == ["it complains", "not a word", "skip"]
    buttons.last.click()
    lesson.show(met).get_by_text("not guessed").wait_for(timeout=30_000)
    explanation = index_of(lesson, 'class="why-4e"')
    assert lesson.show(explanation).locator("details").evaluate("each => each.open")
