"""A claim whose mechanism is broken fails in its proving cell, so the cell is a proof.

``make test`` tries the breaks that take a few seconds, ``make test-all`` those that are marked
``expensive`` as well, and that the cell passes unbroken with only the cells that it seems to need
(each lesson runs as a whole besides).
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
        assert found == ("", ""), f"unbroken, it must pass; does it need further cells? {found}"
    cells = cells_to_run(path, cell_id, broken, [*broken.shorter, *broken.edits])
    failed, error = runs.outcome(runs.run_of(cells, broken.before))
    assert failed, f"{cell_id} still passes, though {broken.how}"
    assert failed == cell_id, f"{failed} failed before {cell_id} was reached: {error}"
    assert broken.error in error
