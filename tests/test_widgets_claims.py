"""The explorer of the appendix: words, verdict and lesson narrow the list of claims."""

import pytest
from IPython.display import Code

from helpers import claims
from helpers.tables import Table
from helpers.widgets.claims import claims_explorer, show_claims

PROOF = claims.Proof("01_a.ipynb", "sum", "Sums", "assert 1 + 1 == 2")
LEDGER = [
    claims.Claim("X1", "The sum is a mean", "false", "01", "It is not", "Names", proof=PROOF),
    claims.Claim("X2", "A mean of means", "true", "02", proof=PROOF),
    claims.Claim("X3", "Rings are fast", "true", "02", pending="no cell yet"),
]


@pytest.fixture
def displayed(monkeypatch):
    shown = []
    monkeypatch.setattr("helpers.widgets.claims.display", shown.append)
    return shown


def ids(table):
    assert isinstance(table, Table)
    return [row[0] for row in table.rows]


def test_one_claim_is_shown_with_its_proof(displayed):
    show_claims(LEDGER, "mean", lesson="01")
    table, code = displayed
    assert ids(table) == ["X1"]
    assert isinstance(code, Code) and code.data == "assert 1 + 1 == 2"


def test_several_pending_and_none(displayed):
    show_claims(LEDGER, "mean")
    show_claims(LEDGER, "ring")
    show_claims(LEDGER, "nowhere")
    several, pending, none = displayed
    assert ids(several) == ["X1", "X2"] and ids(pending) == ["X3"]
    assert "Fewer words" in none


def test_typing_and_choosing_narrow_the_list(displayed):
    words, verdict, lesson = claims_explorer(LEDGER).children[0].children
    assert verdict.options == ("any", "false", "pending", "true")
    assert lesson.options == ("any", "01", "02")
    lesson.value = "02"
    verdict.value = "true"
    lesson.value = "any"
    verdict.value = "any"
    words.value = "mean means"
    tables = [ids(shown) for shown in displayed if isinstance(shown, Table)]
    assert tables[0] == ["X1", "X2", "X3"]
    assert tables[1:3] == [["X2", "X3"], ["X2"]]
    assert tables[-1] == ["X2"]
