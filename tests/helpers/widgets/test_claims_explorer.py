"""The appendix's explorer: words, verdict and lesson narrow the list of claims."""

import pytest
from IPython.display import Code

from helpers.course import claims
from helpers.widgets.claims import claims_explorer, show_claims
from vgpu.tables import Table

PROOF = claims.Proof("01_a.ipynb", "sum", "Sums", "assert 1 + 1 == 2")
LEDGER = [
    claims.Claim("X1", "The sum is a mean", "false", "01", "It is not", "Names", proof=PROOF),
    claims.Claim("X2", "A mean of means", "true", "02", proof=PROOF),
    claims.Claim("X3", "Rings are fast", "true", "02", pending="no cell yet"),
]


@pytest.fixture
def shown(monkeypatch):
    displayed = []
    monkeypatch.setattr("helpers.widgets.claims.display", displayed.append)
    return displayed


def test_a_single_claim_is_shown_with_its_proof(shown):
    show_claims(LEDGER, "mean", lesson="01")
    table, code = shown
    assert isinstance(table, Table) and [row[0] for row in table.rows] == ["X1"]
    assert isinstance(code, Code) and code.data == "assert 1 + 1 == 2"


@pytest.mark.parametrize(
    ("words", "ids"), [("mean", ["X1", "X2"]), ("ring", ["X3"]), ("", ["X1", "X2", "X3"])]
)
def test_multiple_claims_or_a_pending_one_are_listed(words, ids, shown):
    show_claims(LEDGER, words)
    (table,) = shown
    assert [row[0] for row in table.rows] == ids


def test_show_claims_says_that_nothing_was_found(shown, capsys):
    show_claims(LEDGER, "nowhere")
    assert shown == [] and "Try fewer" in capsys.readouterr().out


def test_the_text_field_and_the_menus_narrow_the_list():
    controls, shown = claims_explorer(LEDGER).children
    words, verdict, lesson = controls.children
    assert verdict.options == ("any", "false", "pending", "true")
    assert lesson.options == ("any", "01", "02")

    def listed():
        return [claim.id for claim in LEDGER if f"\n{claim.id} " in shown.outputs[0]["text"]]

    assert listed() == ["X1", "X2", "X3"]
    lesson.value = "02"
    assert listed() == ["X2", "X3"]
    verdict.value = "true"
    assert listed() == ["X2"] and "assert 1" in shown.outputs[0]["text"]
    lesson.value = verdict.value = "any"
    words.value = "rings"
    assert listed() == ["X3"]
    words.value = "rings nowhere"
    assert listed() == [] and "Try fewer" in shown.outputs[0]["text"]
