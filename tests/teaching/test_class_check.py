"""A class is judged in parallel, and the command prints a table and writes a file of verdicts."""

import csv
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from learners import LESSON, LIMITS, SOLUTIONS, hand_in, statuses

from teaching import class_check, lessons
from teaching.judging import Judged


def test_the_command_prints_a_table_and_writes_every_verdict(tmp_path, capsys):
    hand_in(tmp_path / "class", "Ada", SOLUTIONS)
    hand_in(tmp_path / "class", "Bob", {"4.1": "def replica_sizes(b, n):\n    return [b // n] * n"})
    class_check.main([str(tmp_path / "class"), "--csv", str(tmp_path / "all.csv")])
    header, ada, bob = capsys.readouterr().out.splitlines()[:3]
    assert header.split() == ["who", *SOLUTIONS, "right"]
    assert ada.split() == ["Ada", "✓", "✓", "✓", "3"] and bob.split() == ["Bob", "✗", "·", "·", "0"]
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text("utf-8").splitlines()))
    assert len(rows) == 2 * len(SOLUTIONS) and rows[0]["status"] == "right"
    assert "4.1,wrong" in (tmp_path / "all.csv").read_text("utf-8")
    assert "add up to" in (tmp_path / "all.csv").read_text("utf-8")


WAITS = """
import pathlib, time
pathlib.Path({mine!r}).touch()
while not pathlib.Path({other!r}).exists():
    time.sleep(0.05)
def replica_sizes(batch_size, gpus):
    return "met"
"""


def test_lessons_are_judged_in_parallel(tmp_path):
    # Each answer waits for the other: run one after the other, the first would time out.
    one, two = str(tmp_path / "one is there"), str(tmp_path / "two is there")
    hand_in(tmp_path / "class", "one", {"4.1": WAITS.format(mine=one, other=two)})
    hand_in(tmp_path / "class", "two", {"4.1": WAITS.format(mine=two, other=one)})
    limits = class_check.Limits(time_s=90, memory_bytes=3 * 2**30)
    verdicts = class_check.check_class(tmp_path / "class", limits, jobs=2)
    assert [v.who for v in verdicts] == sorted(v.who for v in verdicts)
    assert [v.status for v in verdicts if v.exercise == "4.1"] == ["wrong", "wrong"]


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(2, 64, 1), (16, 64, 8), (16, 10, 3), (16, 1, 1)]
)
def test_class_check_runs_as_many_judges_as_cores_and_memory_allow(monkeypatch, cores, gib, jobs):
    memory = SimpleNamespace(available=gib * 2**30)
    monkeypatch.setattr(class_check.launcher, "cores", lambda: cores)
    monkeypatch.setattr(class_check.psutil, "virtual_memory", lambda: memory)
    assert class_check.at_once(LIMITS) == jobs


def test_ctrl_c_leaves_a_complete_table_of_what_was_judged(tmp_path):
    begun, results = tmp_path / "begun", tmp_path / "results.csv"
    endless = f"open({str(begun)!r}, 'w').close()\nwhile True: pass"
    right = lessons.solution(LESSON, "4.1")
    hand_in(tmp_path / "class", "ann", {"4.1": right})
    hand_in(tmp_path / "class", "bob", {"4.1": right, "4.2": endless})
    hand_in(tmp_path / "class", "cy", {"4.1": right})
    run = subprocess.Popen(
        [sys.executable, "-m", "teaching.class_check", tmp_path / "class", "--csv", results],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell makes background processes, including tests, ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not begun.exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    shown, errors = run.communicate()
    read = csv.DictReader(results.read_text("utf-8").splitlines())
    rows = {(row["who"], row["exercise"]): row["status"] for row in read}
    ids = lessons.exercise_ids(LESSON)
    assert set(rows) == {(who, name) for who in ("ann", "bob", "cy") for name in ids}
    assert rows["ann", "4.1"] == rows["bob", "4.1"] == "right"
    assert {rows["bob", "4.2"], rows["cy", "4.1"], rows["cy", "4.2"]} == {"not judged"}
    assert run.returncode == 1 and "? not judged" in shown
    assert f"stopped; {2 * len(ids) - 1} of {3 * len(ids)} exercises were not judged" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seconds 0", "argument --seconds: expected a number above 0, got '0'"),
        ("--seconds inf", "expected a number above 0, got 'inf'"),
        ("--gib -1", "argument --gib: expected a number above 0, got '-1'"),
        ("--gib much", "expected a number above 0, got 'much'"),
        ("--jobs 0", "argument --jobs: expected an integer of at least 1, got '0'"),
    ],
)
def test_class_check_rejects_invalid_limits(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as left:
        class_check.main([str(tmp_path), *options.split()])
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_csv_that_cannot_be_written_is_reported_before_anyone_is_judged(tmp_path, monkeypatch):
    hand_in(tmp_path / "class", "one", SOLUTIONS)
    monkeypatch.setattr(class_check, "judge", lambda *_: pytest.fail("judged too early"))
    with pytest.raises(SystemExit, match=r"class_check: .*No such file or directory.*nowhere"):
        class_check.main([str(tmp_path / "class"), "--csv", str(tmp_path / "nowhere" / "a.csv")])


def test_a_lesson_that_cannot_be_judged_does_not_affect_the_others(tmp_path, monkeypatch):
    def judged(tasks, *_):
        if "a full disk" in tasks[0].answer:
            raise OSError(28, "No space left on device")
        yield Judged("4.1", "right", "")

    monkeypatch.setattr(class_check, "judged", judged)
    hand_in(tmp_path, "one", {"4.1": "a full disk"})
    hand_in(tmp_path, "two", SOLUTIONS)
    found = statuses(tmp_path)
    assert found["one", "4.2"].status == "error"
    assert "could not be judged: [Errno 28] No space" in found["one", "4.2"].message
    assert found["two", "4.1"].status == "right"
