"""Where judges come from: forked with nothing in common, counted and ended as what they are."""

import os
import sys
import threading

import pytest
from learners import LESSON, SOLUTIONS, is_alive

from teaching.judging import judges
from teaching.judging.limits import Limits, judged

SOLUTION = SOLUTIONS["4.1"]


def verdict(answer):
    [found] = judged(LESSON, {"4.1": [answer]}, {}, Limits(), threading.Event())
    return found


def test_judges_draw_numbers_of_their_own_in_a_folder_of_their_own(tmp_path):
    place = tmp_path / "drawn"
    draws = f"""
import os, random, tempfile
import numpy as np
with open({str(place)!r}, "a") as file:
    print(random.random(), np.random.rand(), os.getcwd(), tempfile.gettempdir(), file=file)
"""
    for _ in range(2):
        assert verdict(draws + SOLUTION).status == "right"
    one, two = (line.split() for line in place.read_text().splitlines())
    assert not set(one) & set(two)
    assert one[2] == one[3] == os.path.join(os.path.dirname(one[2]), "home")


@pytest.mark.skipif(not judges._FORKS, reason="there is no process that forks judges")
def test_a_judge_that_loses_the_process_it_came_from_is_an_error_and_the_next_gets_another():
    assert verdict(SOLUTION).status == "right"
    first = judges._server._process
    kills = f"import os, signal, time\nos.kill({first.pid}, signal.SIGKILL)\ntime.sleep(600)\n"
    lost = verdict(kills)
    assert (lost.status, lost.survived) == ("error", False)
    assert verdict(SOLUTION).status == "right"
    assert judges._server._process is not first


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has guards")
def test_what_is_left_of_a_judge_whose_guard_is_gone_is_found_by_its_mark(tmp_path):
    place = tmp_path / "pid"
    leaves = f"""
import os, signal, time
guard = os.getppid()
if os.fork() == 0:
    os.setsid()
    with open({str(place)!r}, "w") as file:
        print(os.getpid(), file=file)
    os.kill(guard, signal.SIGKILL)
    time.sleep(600)
time.sleep(600)
"""
    assert verdict(leaves).status == "error"
    assert not is_alive(int(place.read_text()))


def test_where_nothing_can_be_forked_a_judge_starts_by_itself(monkeypatch):
    monkeypatch.setattr(judges, "_FORKS", False)
    answers = {"4.1": [SOLUTION], "4.2": ["import os; os._exit(3)"]}
    right, ended = judged(LESSON, answers, {}, Limits(), threading.Event())
    assert right.status == "right"
    assert ended.message == "the process ended: exit code 3"
