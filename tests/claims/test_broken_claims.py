"""A claim whose mechanism is broken fails in its proving cell, so the cell is a proof."""

from contextlib import ExitStack

import notebook_kernel
import pytest
from broken_claims import all_broken, broken_cells, proving, upto

CASES = [(*proving(broken), broken) for broken in all_broken()]
each_break = pytest.mark.parametrize(
    ("path", "cell_id", "broken"),
    CASES,
    ids=[f"{path.stem[:2]}-{broken.claim}-{broken.how}" for path, _, broken in CASES],
)


class Running:
    """The kernel of one lesson at a time, and the outcomes of its cells as the lesson has them."""

    def __init__(self, stack):
        self.stack, self.path, self.kernel, self.whole = stack, None, None, {}

    def of(self, path):
        if path != self.path:
            self.stack.close()
            self.kernel = self.stack.enter_context(notebook_kernel.started(path.parent))
            self.path, self.whole = path, {}
        return self.kernel

    def outcome_unbroken(self, cells, needs):
        key = (cells[-1].id, *needs)
        if key not in self.whole:
            self.whole[key] = self.kernel.run(notebook_kernel.needed(cells, needs))
        return self.whole[key]


@pytest.fixture(scope="module")
def running():
    with ExitStack() as stack:
        yield Running(stack)


@each_break
def test_a_claim_fails_where_its_mechanism_is_broken(running, path, cell_id, broken):
    kernel = running.of(path)
    outcome = running.outcome_unbroken(upto(path, cell_id), broken.needs)
    assert outcome == ("", ""), f"unbroken, it must pass; does it need further cells? {outcome}"
    failed, error = kernel.run(broken_cells(path, cell_id, broken), broken.before)
    assert failed, f"{cell_id} still passes, though {broken.how}"
    assert failed == cell_id, f"{failed} failed before {cell_id} was reached: {error}"
    assert broken.error in error
