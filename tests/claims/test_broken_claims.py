"""A claim whose mechanism is broken fails in its proving cell, so the cell is a proof.

Unbroken, the cell passes: its lesson shows that, with all cells. Here it has only those that it seems
to need. That they are enough is tried where cells are shortened or named by hand, and of the others
for a third; with ``TESTS=whole`` for each.
"""

import pytest
from broken_claims import all_broken, cells_to_run, proving
from sampling import in_third

CASES = [(*proving(broken), broken) for broken in all_broken()]
each_break = pytest.mark.parametrize(
    ("path", "cell_id", "broken"),
    CASES,
    ids=[f"{path.stem[:2]}-{broken.claim}-{broken.how}" for path, _, broken in CASES],
)


@pytest.fixture(scope="module")
def unbroken(kernel):
    """What comes of a proving cell as it stands in its lesson."""

    outcomes = {}

    def outcome(path, cell_id, broken):
        cells = cells_to_run(path, cell_id, broken, broken.shorter)
        sources = tuple(cell.source for cell in cells)
        if sources not in outcomes:
            outcomes[sources] = kernel.run(cells)
        return outcomes[sources]

    return outcome


@each_break
def test_a_claim_fails_where_its_mechanism_is_broken(kernel, unbroken, path, cell_id, broken):
    if broken.shorter or broken.needs or in_third(f"{path.stem} {cell_id}"):
        outcome = unbroken(path, cell_id, broken)
        assert outcome == ("", ""), f"unbroken, it must pass; does it need further cells? {outcome}"
    cells = cells_to_run(path, cell_id, broken, [*broken.shorter, *broken.edits])
    failed, error = kernel.run(cells, broken.before)
    assert failed, f"{cell_id} still passes, though {broken.how}"
    assert failed == cell_id, f"{failed} failed before {cell_id} was reached: {error}"
    assert broken.error in error
