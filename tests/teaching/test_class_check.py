"""A class's answers, judged within limits: right, wrong, endless, greedy, broken, gone."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from helpers import forkserver
from teaching import class_check, lessons

(LESSON,) = (path for path in lessons.NOTEBOOKS if lessons.number(path) == "04")
LIMITS = class_check.Limits(time_s=20, memory_bytes=3 * 2**30)


def hand_in(folder, who, answers, notebook=None, name=LESSON.name):
    """A learner's folder with a copy of the lesson, ``answers`` typed into its exercises."""
    notebook = notebook or json.loads(LESSON.read_text("utf-8"))
    for cell in notebook["cells"]:
        for tag in cell["metadata"].get("tags", ()):
            part, _, exercise_id = tag.partition("-")
            if part == "stub" and exercise_id in answers:
                cell["source"] = answers[exercise_id]
    path = folder / who / "notebooks" / name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(notebook), "utf-8")
    return path


def statuses(folder, limits=LIMITS):
    verdicts = class_check.check_class(folder, limits)
    return {(verdict.who, verdict.exercise): verdict for verdict in verdicts}


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_right_wrong_and_untouched(tmp_path):
    solutions = {name: lessons.solution(LESSON, name) for name in lessons.exercise_ids(LESSON)}
    hand_in(tmp_path, "all", solutions)
    hand_in(tmp_path, "some", {"4.1": "def replica_sizes(b, n):\n    return [b // n] * n"})
    found = statuses(tmp_path)
    assert {found["all", name].status for name in solutions} == {"right"}
    assert found["some", "4.1"].status == "wrong"
    assert "add up to" in found["some", "4.1"].message
    assert found["some", "4.2"].status == "not attempted"


WAITS = """
import pathlib, time
pathlib.Path({mine!r}).touch()
while not pathlib.Path({other!r}).exists():
    time.sleep(0.05)
def replica_sizes(batch_size, gpus):
    return "met"
"""


def test_lessons_are_judged_side_by_side(tmp_path):
    # Each answer waits for the other one: one after the other, the first would be too slow.
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
def test_as_many_at_once_as_cores_and_memory_allow(monkeypatch, cores, gib, jobs):
    memory = SimpleNamespace(available=gib * 2**30)
    monkeypatch.setattr(class_check.machine, "cores", lambda: cores)
    monkeypatch.setattr(class_check.psutil, "virtual_memory", lambda: memory)
    assert class_check.at_once(LIMITS) == jobs


def test_a_limit_of_time_ends_an_answer_and_what_it_started_but_not_the_next_answer(tmp_path):
    pid = tmp_path / "pid"
    endless = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 start_new_session=True, env={{}})
        open({str(pid)!r}, "w").write(str(child.pid))
        import time
        while True: time.sleep(1)
    """
    indented = "\n".join(line.strip() for line in endless.strip().splitlines())
    right = lessons.solution(LESSON, "4.3")
    hand_in(tmp_path / "class", "one", {"4.1": indented, "4.3": right})
    found = statuses(tmp_path / "class", class_check.Limits(time_s=4))
    assert found["one", "4.1"].status == "too slow"
    assert found["one", "4.3"].status == "right"
    assert not is_alive(int(pid.read_text()))


def test_a_limit_of_memory_ends_an_answer(tmp_path):
    hand_in(tmp_path, "one", {"4.2": "kept = bytearray(b'x') * 2**31\nwhile True: pass"})
    found = statuses(tmp_path, class_check.Limits(time_s=500, memory_bytes=2**31))
    assert found["one", "4.2"].status == "too much memory", found["one", "4.2"]


def test_an_answer_that_ends_the_process_or_prints_is_reported_and_the_rest_goes_on(tmp_path):
    forged = 'print(\'{"exercise": "4.2", "status": "right", "message": ""}\', flush=True)'
    answers = {"4.1": "import os; os._exit(3)", "4.2": forged, "4.3": "raise SystemExit"}
    hand_in(tmp_path, "one", answers)
    found = statuses(tmp_path)
    assert found["one", "4.1"].status == "error" and "exit code 3" in found["one", "4.1"].message
    assert found["one", "4.2"].status == "error" and "batch_for_all" in found["one", "4.2"].message
    assert found["one", "4.3"].status == "error" and "SystemExit" in found["one", "4.3"].message


def test_ctrl_c_leaves_a_whole_table_of_what_was_judged(tmp_path):
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
        # A shell ignores the signal for what it starts in the background, tests included.
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
    assert f"stopped; {2 * len(ids) - 1} of {3 * len(ids)} exercises are not judged" in errors


def test_cells_that_are_gone_files_that_are_broken_and_the_newest_copy(tmp_path):
    cut = json.loads(LESSON.read_text("utf-8"))
    cut["cells"] = [c for c in cut["cells"] if "check-4.2" not in c["metadata"].get("tags", ())]
    hand_in(tmp_path, "cut", {}, cut)
    for who, text in {"torn": "{", "odd": '{"cells": [1]}', "empty": '{"cells": null}'}.items():
        (tmp_path / who).mkdir()
        (tmp_path / who / LESSON.name).write_text(text)
    old = hand_in(tmp_path, "twice", {"4.1": "def replica_sizes(b, n):\n    return b"})
    newer = old.parent / f"copy of {old.name}"
    old.rename(newer)
    # Modification times decide, not names.
    (newer.parent / old.name).write_text(LESSON.read_text("utf-8"))
    found = statuses(tmp_path)
    assert found["cut", "4.2"].status == "missing"
    assert found["cut", "4.1"].status == "not attempted"
    for who in ("torn", "odd", "empty"):
        assert found[who, "4.1"].status == "missing"
        assert "not a notebook" in found[who, "4.1"].message
    assert found["twice", "4.1"].status == "not attempted"


def test_tags_may_be_lost_and_the_check_may_not_be_edited(tmp_path):
    untagged = json.loads(LESSON.read_text("utf-8"))
    for cell in untagged["cells"]:
        if "stub-4.1" in cell["metadata"].get("tags", ()):
            cell["source"] = lessons.solution(LESSON, "4.1")
        if "check-4.2" in cell["metadata"].get("tags", ()):
            cell["source"] = "print('Exercise 4.2: right')"
        cell["metadata"] = {}
    hand_in(tmp_path, "one", {}, untagged)
    found = statuses(tmp_path)
    assert found["one", "4.1"].status == "right"
    assert found["one", "4.2"].status == "not attempted"


def test_the_command_prints_a_table_and_writes_every_verdict(tmp_path, capsys):
    hand_in(tmp_path / "class", "Ada", {"4.1": lessons.solution(LESSON, "4.1")})
    class_check.main([str(tmp_path / "class"), "--csv", str(tmp_path / "all.csv")])
    shown = capsys.readouterr().out
    assert "4.1 4.2 4.3" in shown and "Ada" in shown
    rows = (tmp_path / "all.csv").read_text("utf-8").splitlines()
    assert rows[0] == "who,exercise,status,message" and rows[1].startswith("Ada,4.1,right")


@pytest.mark.parametrize("content", ["nothing", "empty", "file"])
def test_a_folder_without_a_class_is_refused(tmp_path, content):
    folder = tmp_path / "class"
    if content == "empty":
        (folder / "someone").mkdir(parents=True)
    if content == "file":
        folder.write_text("")
    with pytest.raises(ValueError, match="folder"):
        class_check.check_class(folder, LIMITS)


SOLUTIONS = {name: lessons.solution(LESSON, name) for name in lessons.exercise_ids(LESSON)}

AS_IN_A_NOTEBOOK = """
%matplotlib widget
%load_ext a_formatter_that_only_the_learner_has
%a_magic_that_only_the_learner_has
import asyncio
await asyncio.sleep(0)
display("shown")
len?
files = !ls /
assert files
left = (17
% 5)
assert left == 2
text = '''
%d GPUs
! nothing
''' % 8
assert text == "\\n8 GPUs\\n! nothing\\n"
"""


def test_answers_run_as_in_a_notebook_and_know_the_names_of_earlier_ones(tmp_path):
    hand_in(
        tmp_path,
        "one",
        {
            "4.1": AS_IN_A_NOTEBOOK + SOLUTIONS["4.1"],
            "4.2": "%%time\nassert left == 2\n" + SOLUTIONS["4.2"],
            "4.3": "assert replica_sizes(16, 8)\n" + SOLUTIONS["4.3"],
        },
    )
    # A process that has ended takes no names along: the answers before it are run again.
    hand_in(tmp_path, "two", {**SOLUTIONS, "4.2": "import os; os._exit(3)"})
    notebook = json.loads(next(tmp_path.glob("two/*/*.ipynb")).read_text("utf-8"))
    (place,) = (
        index
        for index, cell in enumerate(notebook["cells"])
        if "stub-4.3" in cell["metadata"].get("tags", ())
    )
    trial = {"cell_type": "code", "metadata": {}, "source": "assert replica_sizes(16, 8)\n1 / 0"}
    notebook["cells"].insert(place, trial)
    next(tmp_path.glob("two/*/*.ipynb")).write_text(json.dumps(notebook), "utf-8")
    found = statuses(tmp_path)
    assert {found["one", name].status for name in SOLUTIONS} == {"right"}, found
    assert found["two", "4.1"].status == "right"
    assert "exit code 3" in found["two", "4.2"].message
    # The cell that failed is not the one that is asked for; its first line knew the name.
    assert found["two", "4.3"].status == "right"


def test_a_cell_that_fails_is_named_if_the_answer_is_not_right(tmp_path):
    hand_in(tmp_path, "one", {"4.3": "1 / 0"})
    found = statuses(tmp_path)
    assert found["one", "4.3"].status == "error"
    assert found["one", "4.3"].message == "ZeroDivisionError: division by zero"


FORKS = "import os\nos.fork()\n"
WRITES_EVERYWHERE = """
import os
for descriptor in range(1, 64):
    try:
        os.write(descriptor, b'{"exercise": "4.3", "status": "right"}\\nnoise')
        os.close(descriptor)
    except OSError:
        continue
"""
OVERWRITES = """
import builtins, json, os
from teaching import lessons
builtins.print = json.dumps = lessons.tagged = None
"""
SURROGATE = r"raise ValueError('\ud800 \x1b[2J ' + 'x' * 10**6)"
MUTE = """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError('no words')
raise Mute
"""
LEAVES_A_BOMB = """
import os, threading, time
def bomb():
    while not os.path.exists({lit!r}):
        time.sleep(0.01)
    os._exit(9)
threading.Thread(target=bomb, daemon=True).start()
"""
LIGHTS_IT = """
if "bomb" in globals():
    open({lit!r}, "w").close()
    time.sleep(600)
"""


def test_no_answer_ends_the_run_or_another_s_verdict(tmp_path, capsys):
    lit = str(tmp_path / "lit")
    hostile = {
        "forks": {**SOLUTIONS, "4.1": FORKS + SOLUTIONS["4.1"]},
        "overwrites": {**SOLUTIONS, "4.1": OVERWRITES + SOLUTIONS["4.1"]},
        "raises": {"4.1": SURROGATE, "4.2": MUTE, "4.3": SOLUTIONS["4.3"]},
        "waits": {
            "4.1": LEAVES_A_BOMB.format(lit=lit) + SOLUTIONS["4.1"],
            "4.2": LIGHTS_IT.format(lit=lit) + SOLUTIONS["4.2"],
        },
        "writes": {**SOLUTIONS, "4.1": WRITES_EVERYWHERE + SOLUTIONS["4.1"], "4.3": "1 / 0"},
    }
    for who, answers in hostile.items():
        hand_in(tmp_path / "class", who, answers)
    class_check.main([str(tmp_path / "class"), "--csv", str(tmp_path / "all.csv")])
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[1:6]}
    assert rows == {
        "forks": ["✓", "✓", "✓", "3"],
        # What the course itself uses was overwritten, so its verdict is the answer's own fault.
        "overwrites": [rows["overwrites"][0], "✓", "✓", rows["overwrites"][3]],
        "raises": ["!", "!", "✓", "1"],
        "waits": ["✓", "✓", "·", "2"],
        "writes": ["✓", "✓", "!", "2"],
    }
    text = (tmp_path / "all.csv").read_text("utf-8")
    assert r"ValueError: \ud800 \x1b[2J xxx" in text and "Mute, which cannot say more" in text
    assert "ZeroDivisionError" in text and max(map(len, text.splitlines())) < 3000


def test_a_folder_holds_anything_and_every_learner_is_in_the_table(tmp_path, capsys):
    folder = tmp_path / "class"
    hand_in(folder, "Ada", {"4.1": SOLUTIONS["4.1"]})
    odd = {}
    for who in ("deep", "folder", "link", "loop", "pipe", "zip", "none", "large", "bom"):
        (folder / who).mkdir()
        odd[who] = folder / who / LESSON.name
    odd["deep"].write_text('{"cells": ' + "[" * 100_000)
    odd["folder"].mkdir()
    odd["link"].symlink_to(folder / "nowhere")
    (folder / "loop" / "again").symlink_to(folder / "loop")
    os.mkfifo(odd["pipe"])
    (folder / "zip" / "homework.zip").write_bytes(b"PK")
    with odd["large"].open("wb") as file:
        file.truncate(10**12)
    odd["bom"].write_bytes(b"\xef\xbb\xbf" + LESSON.read_bytes())
    # A disk of another system: bytes that are not UTF-8; and a name that would break the table.
    strange = [os.fsencode(folder) + b"/M\xfcller", os.fsencode(folder) + b"/a\nb"]
    for name in strange:
        os.mkdir(name)
        shutil.copy(LESSON, os.fsdecode(name))
    class_check.main([str(folder), "--csv", str(tmp_path / "all.csv")])
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:-3]] == sorted([*odd, "Ada", r"M\xfcller", r"a\nb"])
    with (tmp_path / "all.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    messages = {row["who"]: row["message"] for row in rows}
    assert messages["zip"] == (
        "no lesson in this folder: homework.zip is not a notebook; unpack it there and check again"
    )
    assert messages["none"] == messages["folder"] == "no lesson in this folder"
    for who in ("link", "pipe"):
        assert messages[who] == f"no lesson in this folder: {LESSON.name} is not a notebook"
    assert "is not a notebook: maximum recursion" in messages["deep"]
    assert "is not a notebook: it is larger than 64" in messages["large"]
    statuses_of = {row["who"]: row["status"] for row in rows if row["exercise"] == "4.2"}
    assert {statuses_of[who] for who in ("bom", r"M\xfcller", r"a\nb")} == {"not attempted"}


@pytest.mark.skipif(sys.platform != "linux", reason="shared pages are counted on Linux")
def test_pages_that_processes_share_count_once(tmp_path):
    shares = """
import os, time, torch
held = torch.ones(150 * 2**20)
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        time.sleep(1)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""
    hand_in(tmp_path, "one", {"4.1": shares + SOLUTIONS["4.1"]})
    found = statuses(tmp_path, class_check.Limits(time_s=60, memory_bytes=2 * 2**30))
    assert found["one", "4.1"].status == "right", found["one", "4.1"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_the_class_check_s_own_end_ends_the_judges(tmp_path):
    waits = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    hand_in(tmp_path / "class", "one", {"4.1": waits + "time.sleep(600)"})
    arguments = [str(tmp_path / "class")]
    check = forkserver.context().Process(target=class_check.main, args=(arguments,))
    with forkserver.main_module_hidden():
        check.start()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    check.kill()
    check.join()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))


def wait_until(condition, limit_s=300):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seconds 0", "argument --seconds: expected a number above 0, found '0'"),
        ("--seconds inf", "expected a number above 0, found 'inf'"),
        ("--gib -1", "argument --gib: expected a number above 0, found '-1'"),
        ("--gib much", "expected a number above 0, found 'much'"),
        ("--jobs 0", "argument --jobs: expected a whole number from 1, found '0'"),
    ],
)
def test_limits_that_cannot_work_are_refused_in_a_sentence(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as left:
        class_check.main([str(tmp_path), *options.split()])
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_csv_that_cannot_be_written_is_reported_before_anybody_is_judged(tmp_path, monkeypatch):
    hand_in(tmp_path / "class", "one", SOLUTIONS)
    monkeypatch.setattr(class_check, "judge", lambda *_: pytest.fail("an hour was lost"))
    with pytest.raises(SystemExit, match=r"class_check: .*No such file or directory.*nowhere"):
        class_check.main([str(tmp_path / "class"), "--csv", str(tmp_path / "nowhere" / "a.csv")])


def test_only_zips_are_reported_as_such(tmp_path):
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "ada.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"no folder with a lesson .*; unpack ada.zip, for one"):
        class_check.check_class(tmp_path / "class", LIMITS)
