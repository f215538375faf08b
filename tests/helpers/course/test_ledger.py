"""The ledger's claims can be searched and counted, and each links to the cell that proves it."""

import json

import pytest

from helpers.course import claims
from teaching import lessons

NOTEBOOKS = lessons.ROOT / "notebooks"

LEDGER = """
- {id: X1, claim: The sum is a mean, verdict: "false", lesson: "01", holds: It is not, believed: Names}
- {id: X2, claim: A mean of means, verdict: "true", lesson: "02"}
- {id: X3, claim: Rings are fast, verdict: "true", lesson: "02", pending: no cell yet}
"""


def cell(kind, cell_id, source, *tags):
    return {"cell_type": kind, "id": cell_id, "source": [source], "metadata": {"tags": list(tags)}}


@pytest.fixture
def folder(tmp_path):
    """A ledger with three claims and two lessons; X1 is proved in both, and twice in its own."""
    (tmp_path / "claims.yml").write_text(LEDGER, encoding="utf-8")
    first = [
        cell("markdown", "opening", "# Title\n\n```\n# no heading\n```"),
        cell("markdown", "words", "Text\n\n## Sums\nmore"),
        cell("code", "sum", "assert 1 + 1 == 2", "claim-X1"),
        cell("code", "again", "assert True", "claim-X1"),
    ]
    second = [
        cell("code", "elsewhere", "assert 3", "claim-X1"),
        cell("code", "mean", "assert 4", "figure", "claim-X2"),
    ]
    for name, cells in (("01_a.ipynb", first), ("02_b.ipynb", second)):
        (tmp_path / name).write_text(json.dumps({"cells": cells}), encoding="utf-8")
    return tmp_path


def test_a_claim_links_to_the_first_proof_in_its_own_lesson(folder):
    one, two, three = claims.read(folder)
    assert one.proof == claims.Proof("01_a.ipynb", "sum", "Sums", "assert 1 + 1 == 2")
    assert one.proof.address == "01_a.ipynb#cell-id=sum"
    assert (two.proof.heading, two.proof.cell_id) == ("", "mean")
    assert three.proof is None and three.status == "pending" and one.status == "false"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, ["X1", "X2", "X3"]),
        ({"words": "MEAN"}, ["X1", "X2"]),
        ({"words": "mean sum"}, ["X1"]),
        ({"words": "names"}, ["X1"]),
        ({"words": "x3"}, ["X3"]),
        ({"words": "nowhere"}, []),
        ({"verdict": "true"}, ["X2"]),
        ({"verdict": "pending"}, ["X3"]),
        ({"lesson": "02"}, ["X2", "X3"]),
        ({"words": "mean", "verdict": "true", "lesson": "01"}, []),
    ],
)
def test_search_returns_claims_that_match_all_words_and_filters(folder, asked, found):
    assert [claim.id for claim in claims.search(claims.read(folder), **asked)] == found


def test_counts_have_a_column_for_each_verdict_that_occurs(folder):
    table = claims.counts(claims.read(folder))
    assert list(table.header) == ["lesson", "true", "false", "pending", "claims"]
    assert table.rows == [["01", "", 1, "", 1], ["02", 1, "", 1, 2], ["all", 1, 1, 1, 3]]


def test_counts_have_a_separate_column_for_predictions(folder):
    ledger = claims.read(folder)
    ledger.append(claims.Claim("X4", "Two GPUs are slower", "predicted", "02", "By 5 %"))
    table = claims.counts(ledger)
    assert list(table.header) == ["lesson", "true", "false", "predicted", "pending", "claims"]
    assert table.rows[-1] == ["all", 1, 1, 1, 1, 4]
    assert claims.search(ledger, verdict="predicted") == ledger[3:]


def test_tables_link_to_the_cells_that_prove_claims(folder):
    ledger = claims.read(folder)
    listed = claims.listing(ledger)
    assert listed.caption == "3 claims" and claims.listing(ledger[:1]).caption == "1 claim"
    assert listed.rows[0] == ("X1", "false", "The sum is a mean", "It is not", "01 · Sums")
    assert listed.rows[2][-1] == "02 · no cell yet"
    assert listed.links == {"X1": "01_a.ipynb#cell-id=sum", "X2": "02_b.ipynb#cell-id=mean"}
    assert claims.answers(ledger).rows[0] == ("X1", "The sum is a mean", "It is not", "Names")


def test_read_rejects_a_folder_without_claims(tmp_path):
    with pytest.raises(FileNotFoundError, match="run this in notebooks/"):
        claims.read(tmp_path)


@pytest.mark.parametrize("claim", claims.read(NOTEBOOKS), ids=lambda claim: claim.id)
def test_each_link_in_the_course_leads_to_a_cell_that_proves_its_claim(claim):
    if claim.status == claims.PENDING:
        assert claim.proof is None
        return
    name, _, cell_id = claim.proof.address.partition("#cell-id=")
    (found,) = [cell for cell in lessons.cells(NOTEBOOKS / name) if cell.id == cell_id]
    assert f"claim-{claim.id}" in found.tags and claim.proof.heading


def test_a_folded_table_is_one_line_in_a_notebook_and_complete_as_text(folder):
    table = claims.answers(claims.read(folder)[:1])
    folded = claims.Folded(table, "1 sentence & why")
    shown = folded._repr_html_()
    assert shown.startswith("<details><summary>1 sentence &amp; why</summary>")
    assert table._repr_html_() in shown and "open" not in shown.partition(">")[0]
    assert str(folded) == f"1 sentence & why\n{table}"
