"""The site's explorers in a browser: as a file, with the keyboard, and without JavaScript."""

from itertools import product

import pytest

from teaching import lessons
from teaching.pages import explorers

VALUES = {
    "GPUs": ["1", "8", "64"],
    "over": ["NVLink", "PCIe"],
    "GPU": ["H100"],
    "batch": ["2", "4"],
}
SETTINGS = list(product(*VALUES.values()))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page with an explorer whose answers name their settings; initially 8, PCIe, H100, 2."""
    controls = [
        {"label": name, "values": values, "now": now, "slider": name in ("GPUs", "batch")}
        for (name, values), now in zip(VALUES.items(), (1, 1, 0, 0), strict=True)
    ]
    texts = ["always", *map(" ".join, SETTINGS)]
    parts = [{"output_type": "stream", "name": "stdout", "text": text} for text in texts]
    answers = [[0, place] for place in range(1, len(texts))]
    found = {"controls": controls, "parts": parts, "answers": answers, "seconds": 0.0}
    page = tmp_path_factory.mktemp("page") / "page.html"
    script = lessons.ROOT / "teaching" / "pages" / "explorers.js"
    body = explorers.explorer(found, page.parent, "a-0")
    page.write_text(f'<script src="{script.as_uri()}" defer></script>\n{body}')
    return page.as_uri()


def test_every_position_of_the_controls_shows_its_answer(browser, address):
    page = browser.new_page()
    page.goto(address)
    shown = page.locator(".explorer-answer pre")
    assert shown.all_inner_texts() == ["always", "8 PCIe H100 2"]
    seen = []
    for gpus, over, _, batch in SETTINGS:
        for name, words in (("GPUs", gpus), ("batch", batch)):
            slider = page.get_by_label(name, exact=True)
            slider.press("Home")
            for _ in range(VALUES[name].index(words)):
                slider.press("ArrowRight")
            assert slider.get_attribute("aria-valuetext") == words
        page.get_by_label("over").select_option(over)
        always, answer = shown.all_inner_texts()
        assert always == "always"
        seen.append(answer)
        assert page.locator("output").all_inner_texts() == [gpus, "H100", batch]
    assert seen == [" ".join(setting) for setting in SETTINGS]
    page.close()


def test_a_page_without_javascript_shows_the_first_answer_and_no_dead_controls(browser, address):
    page = browser.new_page(java_script_enabled=False)
    page.goto(address)
    assert page.locator(".explorer-answer").inner_text().split("\n")[-1] == "8 PCIe H100 2"
    assert page.locator("form").is_hidden()
    assert explorers.NO_SCRIPT in page.locator(".explorer-note").inner_text()
    page.close()
