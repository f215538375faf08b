"""A claim whose mechanism is broken fails in its proving cell, so the cell is a proof."""

from contextlib import ExitStack
from dataclasses import replace

import notebook_kernel
import pytest
from broken_claims import all_broken

from teaching import lessons

PROVING = {
    (tag.removeprefix("claim-"), cell.id): path
    for path in lessons.NOTEBOOKS
    for cell in lessons.cells(path)
    for tag in cell.tags
    if tag.startswith("claim-")
}


def proving(broken):
    """The notebook and the id of the cell that must fail."""
    found = [
        (path, cell)
        for (claim, cell), path in PROVING.items()
        if claim == broken.claim and broken.cell in ("", cell)
    ]
    assert len(found) == 1, f"{broken.claim} ({broken.how}): which of these cells? {found}"
    return found[0]


def upto(path, cell_id):
    """A notebook's code cells up to one, that one included."""
    code = [cell for cell in lessons.cells(path) if cell.is_code]
    return code[: [cell.id for cell in code].index(cell_id) + 1]


def edited(cells, old, new):
    """The cells with one text replaced, and the id of the cell it stood in."""
    places = [cell.id for cell in cells for _ in range(cell.source.count(old))]
    assert len(places) == 1, f"the text to break stands in {places or 'no cell'}: {old!r}"
    changed = [replace(cell, source=cell.source.replace(old, new)) for cell in cells]
    return changed, places[0]


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
    kernel, cells = running.of(path), upto(path, cell_id)
    outcome = running.outcome_unbroken(cells, broken.needs)
    assert outcome == ("", ""), f"unbroken, it must pass; does it need further cells? {outcome}"
    places = set()
    for old, new in broken.edits:
        cells, place = edited(cells, old, new)
        places.add(place)
    cells = notebook_kernel.needed(cells, broken.needs)
    unused = places - {cell.id for cell in cells}
    assert not unused, f"{broken.claim} does not need the cells that are edited: {unused}"
    failed, error = kernel.run(cells, broken.before)
    assert failed, f"{cell_id} still passes, though {broken.how}"
    assert failed == cell_id, f"{failed} failed before {cell_id} was reached: {error}"
    assert broken.error in error
