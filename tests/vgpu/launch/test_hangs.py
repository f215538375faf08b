"""Which hangs are certain, and who's reported missing, given where the ranks are."""

import math
from collections import Counter

from vgpu.launch.hangs import (
    STOPPED,
    CallSite,
    CollectiveRecord,
    Message,
    RankState,
    explain,
    is_deadlock,
    mismatches,
)

LINE = CallSite("train.py", 3, "dist.all_reduce(t)")
BOTH = {"0": [0, 1]}


def started(number, *, group="0", finished=False, name="all_reduce", shape=(2,)):
    numels = ((math.prod(shape), "Float"),)
    return CollectiveRecord(
        f"{group}/gloo", number, name, LINE, f"{[*shape]} Float", numels, finished
    )


def waiting(*collectives, members=None):
    return RankState("runs", LINE, "all_reduce", True, list(collectives), members or BOTH)


def returned(*collectives):
    return RankState("has returned", collectives=list(collectives), members=BOTH)


def computing(*collectives):
    return RankState("runs", LINE, collectives=list(collectives), members=BOTH)


def test_a_hang_is_not_certain_while_a_rank_computes():
    assert not is_deadlock([waiting(started(1)), computing()])
    assert not is_deadlock([waiting(started(1)), None])


def test_ranks_in_the_same_collective_are_not_deadlocked():
    assert not is_deadlock([waiting(started(1)), waiting(started(1))])
    # One rank has moved on to the next collective while the other is finishing this one.
    ahead = waiting(started(1, finished=True), started(2))
    assert not is_deadlock([ahead, waiting(started(1))])


def test_a_rank_outside_the_group_is_not_missing():
    members = {"1": [0, 1]}
    inside = waiting(started(1, group="1"), members=members)
    text = explain([inside, returned(), returned()], str)
    assert "rank 0 arrived, rank 1 never arrived" in text and "rank 2 never" not in text


def test_all_reduce_of_different_sizes_is_a_mismatch():
    ranks = [waiting(started(1)), waiting(started(1, shape=(3,)))]
    assert is_deadlock(ranks)
    assert "Mismatch in all_reduce" in explain(ranks, str)
    # One rank finished with the data that had arrived, and is waiting for the other in the next
    # collective.
    ahead = waiting(started(1, finished=True), started(2, name="barrier"))
    assert is_deadlock([ahead, waiting(started(1, shape=(3,)))])


def test_all_reduce_of_different_shapes_of_equal_size_is_not_a_mismatch():
    ranks = [waiting(started(1, shape=(2, 3))), waiting(started(1, shape=(6,)))]
    assert not is_deadlock(ranks) and "Mismatch" not in explain(ranks, str)
    uneven = [waiting(started(1, name="all_gather", shape=(n,))) for n in (2, 3)]
    assert not is_deadlock(uneven), "an all_gather's shares may be unequal"


def messaging(rank, source, target, *, others=(), tag=0):
    """Return the state of a rank in a send or recv; ``others`` are messages that it sent before."""
    message = Message("0", source, target, tag)
    state = RankState("runs", LINE, "recv", True, [], BOTH, message=message)
    (state.received if rank == target else state.sent)[message] += 1
    state.sent.update(others)
    return state


def test_ranks_that_all_receive_from_the_next_rank_are_deadlocked():
    ring = [messaging(rank, (rank + 1) % 3, rank) for rank in range(3)]
    assert is_deadlock(ring)
    assert not is_deadlock([*ring[:2], None])
    sent = Message("0", 1, 0, 0)
    assert not is_deadlock([ring[0], messaging(1, 2, 1, others=[sent]), ring[2]]), (
        "the message is on its way"
    )
    other_tag = [sent._replace(tag=1)]
    assert is_deadlock([ring[0], messaging(1, 2, 1, others=other_tag), ring[2]])


def test_a_message_to_or_from_a_rank_that_has_returned_is_a_certain_hang():
    assert is_deadlock([messaging(0, 1, 0), returned()])
    assert is_deadlock([messaging(0, 0, 1), returned()])
    took_any = returned()
    took_any.received = Counter([Message("0", -1, 1, 0)])
    assert not is_deadlock([messaging(0, 0, 1), took_any])


def making_group(ranks, made=2):
    state = waiting()
    state.new_group, state.groups_made = ranks, made
    return state


def test_a_new_group_that_a_member_never_creates_is_a_certain_hang():
    missing = returned()
    missing.groups_made = 1
    assert is_deadlock([making_group([0, 1]), missing])
    assert is_deadlock([making_group([0, 1]), waiting(started(1))])
    text = explain([making_group([0, 1]), missing], str)
    assert "new_group([0, 1]): rank 0 arrived, rank 1 never arrived" in text
    assert not is_deadlock([making_group([0, 1]), making_group([0, 1])])
    missing.groups_made = 2  # the rank has created it and moved on
    assert not is_deadlock([making_group([0, 1]), missing])


def test_a_group_whose_timeout_comes_first_raises_its_own_error():
    stuck = waiting(started(1))
    stuck.timeouts_s = {"0": 20.0}
    assert not is_deadlock([stuck, returned()], within_s=60)
    assert is_deadlock([stuck, returned()], within_s=10)


def test_all_reduce_of_different_dtypes_is_a_mismatch():
    wide = CollectiveRecord("0/gloo", 1, "all_reduce", LINE, "[2] Double", ((2, "Double"),), False)
    (line,) = mismatches([waiting(started(1)), waiting(wide)])
    assert "rank 0 passes [2] Float; rank 1 passes [2] Double" in line


def test_a_stopped_rank_hangs_the_ranks_that_wait_for_it():
    assert is_deadlock([waiting(started(1)), RankState(STOPPED)])
    assert is_deadlock([messaging(0, 1, 0), RankState(STOPPED)])
    assert not is_deadlock([computing(), RankState(STOPPED)])
    text = explain([waiting(started(1)), RankState(STOPPED)], str)
    assert "rank 1 is stopped" in text and "nothing is known about rank 1" in text
