"""A claim whose mechanism is broken fails in its proving cell, so the cell is a proof.

Without ``TESTS=whole`` in the environment a third is tried, and none that is marked ``expensive``.

Unbroken, the cell passes: its lesson shows that, with all cells. Here it has only those that it seems
to need. That they are enough is tried where cells are shortened or named by hand, and of the others
for a third; with ``TESTS=whole`` for each.
"""

import pytest
from broken_claims import all_broken, cells_to_run, proving
from forked_runs import run_of
from sampling import WHOLE, in_third

ALL = [(*proving(broken), broken) for broken in all_broken()]


def sampled(cases):
    """A third of those that are not expensive, and the first of each lesson's letters."""
    quick = [case for case in cases if not case[-1].expensive]
    first = {kind(case): case for case in reversed(quick)}
    return [
        case
        for case in quick
        if case is first[kind(case)] or in_third(f"{case[-1].claim} {case[-1].how}")
    ]


def kind(case):
    path, _, broken = case
    return path, broken.claim[0]


CASES = ALL if WHOLE else sampled(ALL)
each_break = pytest.mark.parametrize(
    ("path", "cell_id", "broken"),
    CASES,
    ids=[f"{path.stem[:2]}-{broken.claim}-{broken.how}" for path, _, broken in CASES],
)


def unbroken_run(path, cell_id, broken):
    """The proving cell as it stands in its lesson, or None where that is not tried."""
    if broken.shorter or broken.needs or in_third(f"{path.stem} {cell_id}"):
        return run_of(cells_to_run(path, cell_id, broken, broken.shorter))
    return None


def broken_run(path, cell_id, broken):
    cells = cells_to_run(path, cell_id, broken, [*broken.shorter, *broken.edits])
    return run_of(cells, broken.before)


@pytest.fixture(scope="module")
def outcome(request, player):
    """How a run ends. A lesson's runs are begun together: they have their first cells in common."""
    of_lesson, begun = {}, set()
    for item in request.session.items:
        if getattr(item, "function", None) is test_a_claim_fails_where_its_mechanism_is_broken:
            case = [item.callspec.params[name] for name in ("path", "cell_id", "broken")]
            runs = unbroken_run(*case), broken_run(*case)
            of_lesson.setdefault(case[0], []).extend(run for run in runs if run)

    def outcome_of(path, run):
        if path not in begun:
            begun.add(path)
            player.begin(of_lesson[path])
        return player.outcome(run)

    return outcome_of


@each_break
def test_a_claim_fails_where_its_mechanism_is_broken(outcome, path, cell_id, broken):
    if unbroken := unbroken_run(path, cell_id, broken):
        found = outcome(path, unbroken)
        assert found == ("", ""), f"unbroken, it must pass; does it need further cells? {found}"
    failed, error = outcome(path, broken_run(path, cell_id, broken))
    assert failed, f"{cell_id} still passes, though {broken.how}"
    assert failed == cell_id, f"{failed} failed before {cell_id} was reached: {error}"
    assert broken.error in error


def test_each_run_tries_something_of_every_lesson_and_every_letter():
    assert {kind(case) for case in sampled(ALL)} == {kind(case) for case in ALL}
