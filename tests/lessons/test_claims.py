"""Every claim in the ledger has a cell that proves it, and every such cell has a claim."""

import ast

import pytest
import yaml
from broken_claims import all_broken, cells_to_run, proving

from helpers.course.claims import VERDICTS, lesson_of
from teaching import lessons

LEDGER = yaml.safe_load((lessons.ROOT / "notebooks" / "claims.yml").read_text(encoding="utf-8"))
PROVED = [claim for claim in LEDGER if "pending" not in claim]
ASSERTING = ("assert_close", "assert_equal", "expected_error", "expected_warning")


def cells_tagged(prefix):
    """Map each claim's id to the (lesson, cell) pairs tagged with it, as in ``claim-A01``."""
    found = {}
    for path in lessons.NOTEBOOKS:
        for cell in lessons.cells(path):
            for tag in cell.tags:
                if tag.startswith(prefix):
                    place = (lesson_of(path), cell)
                    found.setdefault(tag.removeprefix(prefix), []).append(place)
    return found


def proving_cells():
    return cells_tagged("claim-")


def asserts_something(source):
    """Return whether a cell has an assert, or a call such as ``assert_close``, that can fail."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ASSERTING:
            return True
    return False


def test_the_ledger_is_well_formed():
    ids = [claim["id"] for claim in LEDGER]
    assert len(ids) == len(set(ids)), "an id occurs twice"
    for claim in LEDGER:
        assert set(claim) <= {"id", "claim", "verdict", "holds", "believed", "lesson", "pending"}
        assert claim["verdict"] in VERDICTS
        if claim["verdict"] != "true" and "pending" not in claim:
            assert claim.get("holds"), (
                f"{claim['id']} is {claim['verdict']}: say what holds instead"
            )
        if claim["verdict"] in ("dated", "false") and "pending" not in claim:
            assert claim.get("believed"), f"{claim['id']}: say why people believe it"


@pytest.mark.parametrize("claim", PROVED, ids=lambda claim: claim["id"])
def test_each_claim_is_proved_by_a_cell_of_its_lesson(claim):
    places = proving_cells().get(claim["id"], [])
    assert places, f"no cell is tagged claim-{claim['id']}"
    assert claim["lesson"] in [number for number, _ in places]
    for number, cell in places:
        assert asserts_something(cell.source), f"lesson {number}, {cell.id} asserts nothing"


@pytest.mark.parametrize("claim", PROVED, ids=lambda claim: claim["id"])
def test_a_prediction_shows_how_it_changes_with_the_assumed_values(claim):
    places = cells_tagged("moves-").get(claim["id"], [])
    if claim["verdict"] == "predicted":
        assert places, f"no cell is tagged moves-{claim['id']}"
        assert claim["lesson"] in [number for number, _ in places]
    else:
        assert not places, (
            f"{claim['id']} is not a prediction, but a cell is tagged moves-{claim['id']}"
        )
    for number, cell in places:
        assert asserts_something(cell.source), f"lesson {number}, {cell.id} asserts nothing"


def test_no_cell_names_an_unknown_or_pending_claim():
    named = set(proving_cells()) | set(cells_tagged("moves-"))
    unknown = named - {claim["id"] for claim in PROVED}
    assert not unknown, f"cells are tagged with claims that are unknown or pending: {unknown}"


def test_a_pending_claim_has_a_reason():
    for claim in LEDGER:
        if "pending" in claim:
            assert len(claim["pending"]) > 10, f"{claim['id']} is pending without a reason"


@pytest.mark.parametrize("broken", all_broken(), ids=lambda broken: f"{broken.claim}-{broken.how}")
def test_the_text_that_a_break_replaces_is_in_the_lesson(broken):
    # tests/claims checks whether the claim then fails.
    assert cells_to_run(*proving(broken), broken, [*broken.shorter, *broken.edits])


# Claims whose proving cell once passed although the claim was broken.
ONCE_BADLY_PROVED = {
    "A06",
    "A09",
    "A15",
    "B13",
    "B16",
    "B31",
    "C14",
    "C15",
    "C16",
    "C20",
    "D12",
    "E07",
}


def test_claims_that_once_had_weak_proofs_have_breaks():
    untried = ONCE_BADLY_PROVED - {broken.claim for broken in all_broken()}
    assert not untried, f"add to tests/support/broken_claims: {sorted(untried)}"
