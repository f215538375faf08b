"""If a claim's mechanism is broken, its proving cell fails: the cell really proves the claim.

``make test`` tries the breaks that take a few seconds. ``make test-all`` also tries those marked
``expensive``, and checks that each unbroken cell passes with only the cells that it seems to need
(other tests run each lesson in full).
"""

import pytest
import runs
from broken_claims import all_broken, cells_to_run, proving
from levels import ALL

CASES = [(*proving(broken), broken) for broken in all_broken() if ALL or not broken.expensive]


@pytest.mark.parametrize(
    ("path", "cell_id", "broken"),
    CASES,
    ids=[f"{path.stem[:2]}-{broken.claim}-{broken.how}" for path, _, broken in CASES],
)
def test_a_claim_fails_if_its_mechanism_is_broken(path, cell_id, broken):
    if ALL or broken.shorter or broken.needs:
        unbroken = runs.run_of(cells_to_run(path, cell_id, broken, broken.shorter))
        found = runs.outcome(unbroken)
        assert found == ("", ""), f"must pass unbroken; does it need more cells? {found}"
    cells = cells_to_run(path, cell_id, broken, [*broken.shorter, *broken.edits])
    failed, error = runs.outcome(runs.run_of(cells, broken.before))
    assert failed, f"{cell_id} still passes, though {broken.how}"
    assert failed == cell_id, f"{failed} failed before {cell_id} was reached: {error}"
    assert broken.error in error
