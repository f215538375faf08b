"""The site's own pages, and the check for broken links."""

import re

import pytest

from helpers.course import claims
from teaching import book, lessons

SHELL = "<html><body>{}</body></html>"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('<a href="b.html#here">there</a>', None),
        ('<a href="https://pytorch.org">elsewhere</a>', None),
        ('<a href="c.html">gone</a>', "c.html"),
        ('<a href="b.html#gone">gone</a>', "no such anchor"),
        ('<img src="gone.png">', "gone.png"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "loads https://example.org"),
    ],
)
def test_broken_links_and_external_resources_are_found(tmp_path, body, message):
    (tmp_path / "a.html").write_text(SHELL.format(body))
    (tmp_path / "b.html").write_text(SHELL.format('<p id="here">'))
    found = list(book.broken_links(tmp_path))
    assert len(found) == (message is not None)
    if message:
        assert found[0].startswith("a.html: ") and message in found[0]


def test_a_lesson_can_be_opened_on_binder_if_the_repository_is_known(monkeypatch):
    assert "launch_buttons" not in book.configuration("")["html_theme_options"]
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    options = book.configuration(book._repository_of_the_workflow())["html_theme_options"]
    assert options["repository_url"] == "https://github.com/owner/name"
    assert options["launch_buttons"]["binderhub_url"] == "https://mybinder.org"
    assert (lessons.ROOT / options["path_to_docs"] / lessons.NOTEBOOKS[0].name).exists()
    assert not book.CONFIGURATION["html_theme_options"].get("repository_url")


def test_the_claims_page_has_a_row_for_each_claim_with_its_section():
    ledger = claims.read(lessons.ROOT / "notebooks")
    rows = [line for line in book.claims_page(ledger).splitlines() if line.startswith("| ")]
    assert len(rows) == len(ledger) + 1
    for claim, row in zip(ledger, rows[1:], strict=True):
        assert row.startswith(f"| {claim.id} |")
        assert row.replace("\\|", "").count("|") == 6, "a bar in a claim must not split the row"
        if claim.proof:
            assert f"]({claim.proof.notebook}#" in row


def test_a_terms_first_use_links_to_the_glossary():
    terms = ["rank", "all-reduce", "ring"]
    text = "# A rank\n`rank` and ring-shaped, [a rank](x.md). Ranks of a rank.\n```\nring\n```"
    linked = book.link_first_uses(text, terms)
    assert linked == text.replace("Ranks of", "[Ranks](glossary.md#rank) of")
    assert terms == ["all-reduce", "ring"]


def test_every_term_of_the_glossary_is_used_in_the_course_and_has_a_lesson():
    text = book.GLOSSARY.read_text(encoding="utf-8")
    entries = re.findall(r"^## (.*)\n.* \(\[lesson (\d\d)\]\(.*/\2_.*\)\)$", text, re.MULTILINE)
    unused = book.glossary_terms()
    assert [term for term, _ in entries] == unused == sorted(unused, key=str.lower)
    for path in lessons.NOTEBOOKS:
        for cell in lessons.cells(path):
            if not cell.is_code:
                book.link_first_uses(cell.source, unused)
    assert not unused, "no lesson uses these terms"
