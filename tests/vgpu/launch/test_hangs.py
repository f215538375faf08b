"""Which hangs are certain, and who is reported missing, from where the ranks are."""

import math

from vgpu.launch.call_sites import CallSite, CollectiveRecord, RankState
from vgpu.launch.failures import explain, is_deadlock

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


def test_one_that_still_computes_may_yet_come():
    assert not is_deadlock([waiting(started(1)), computing()])
    assert not is_deadlock([waiting(started(1)), None])


def test_all_in_the_same_collective_is_no_deadlock():
    assert not is_deadlock([waiting(started(1)), waiting(started(1))])
    # One has gone on to the next while the other is finishing.
    ahead = waiting(started(1, finished=True), started(2))
    assert not is_deadlock([ahead, waiting(started(1))])


def test_a_rank_outside_the_group_is_not_missing():
    members = {"1": [0, 1]}
    inside = waiting(started(1, group="1"), members=members)
    text = explain([inside, returned(), returned()])
    assert "rank 0 came, rank 1 never came" in text and "rank 2 never" not in text


def test_different_sizes_in_one_all_reduce():
    ranks = [waiting(started(1)), waiting(started(1, shape=(3,)))]
    assert is_deadlock(ranks)
    assert "Mismatch in all_reduce" in explain(ranks)
    # One has got through with what there was, and waits for the other at the next.
    ahead = waiting(started(1, finished=True), started(2, name="barrier"))
    assert is_deadlock([ahead, waiting(started(1, shape=(3,)))])


def test_as_many_elements_in_another_shape_are_no_mismatch():
    ranks = [waiting(started(1, shape=(2, 3))), waiting(started(1, shape=(6,)))]
    assert not is_deadlock(ranks) and "Mismatch" not in explain(ranks)
    uneven = [waiting(started(1, name="all_gather", shape=(n,))) for n in (2, 3)]
    assert not is_deadlock(uneven), "NCCL gathers unequal shares"


def test_a_group_that_gives_up_in_time_is_left_to_say_so():
    stuck = waiting(started(1))
    stuck.timeouts_s = {"0": 20.0}
    assert not is_deadlock([stuck, returned()], within_s=60)
    assert is_deadlock([stuck, returned()], within_s=10)
