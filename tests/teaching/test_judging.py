"""Answers are judged as in a notebook; endless, greedy or hostile ones don't harm other learners."""

import json
import sys
import time

import pytest
from learners import SOLUTIONS, hand_in, is_alive, statuses

from teaching import class_check
from teaching.judging import Limits
from vgpu.launch import processes

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


# Typed as in a notebook; later answers can use names that earlier ones define.
TYPED = {
    "4.1": AS_IN_A_NOTEBOOK + SOLUTIONS["4.1"],
    "4.2": "%%time\nassert left == 2\n" + SOLUTIONS["4.2"],
    "4.3": "assert replica_sizes(16, 8)\n" + SOLUTIONS["4.3"],
}


def test_answers_after_one_that_ends_the_process_still_have_earlier_names(tmp_path):
    # When the process ends, the names from 4.1 are lost: the next process reruns 4.1.
    one = hand_in(tmp_path, "one", {**SOLUTIONS, "4.2": "import os; os._exit(3)"})
    notebook = json.loads(one.read_text("utf-8"))
    tags = [cell["metadata"].get("tags", ()) for cell in notebook["cells"]]
    (place,) = (index for index, of in enumerate(tags) if "stub-4.3" in of)
    # A failing cell above a right answer.
    trial = {"cell_type": "code", "metadata": {}, "source": "assert replica_sizes(16, 8)\n1 / 0"}
    notebook["cells"].insert(place, trial)
    one.write_text(json.dumps(notebook), "utf-8")
    found = statuses(tmp_path)
    assert [found["one", name].status for name in SOLUTIONS] == ["right", "error", "right"]
    assert found["one", "4.2"].message == "the process ended: exit code 3"


STARTS_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True, env={{}})
open({pid!r}, "w").write(str(child.pid))
while True: time.sleep(1)
"""
KILLS_ITS_GUARD = """
import os, signal, time
guard = os.getppid()
if os.fork() == 0:
    os.setsid()
    open({pid!r}, "w").write(str(os.getpid()))
    time.sleep(600)
time.sleep(1)
os.kill(guard, signal.SIGKILL)
time.sleep(600)
"""


def test_the_time_limit_terminates_an_answer_and_everything_it_started_but_not_the_next(tmp_path):
    pids = [tmp_path / "one", tmp_path / "two"]
    answers = {
        "4.1": STARTS_A_CHILD.format(pid=str(pids[0])),
        "4.2": KILLS_ITS_GUARD.format(pid=str(pids[1])),
        "4.3": SOLUTIONS["4.3"],
    }
    if sys.platform != "linux":
        del answers["4.2"]  # only Linux has guards
    hand_in(tmp_path / "class", "one", answers)
    found = statuses(tmp_path / "class", Limits(time_s=5))
    assert found["one", "4.1"].status == "too slow"
    assert found["one", "4.3"].status == "right"
    if sys.platform == "linux":
        assert found["one", "4.2"].status == "error"
    assert not any(is_alive(int(pid.read_text())) for pid in pids if pid.exists())


SHARES = """
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


def test_the_memory_limit_terminates_an_answer_and_counts_shared_pages_once(tmp_path):
    answers = {"4.2": "kept = bytearray(b'x') * 2**31\nwhile True: pass"}
    if sys.platform == "linux":
        answers["4.1"] = SHARES + SOLUTIONS["4.1"]
    hand_in(tmp_path, "one", answers)
    found = statuses(tmp_path, Limits(time_s=500, memory_bytes=2**31))
    assert found["one", "4.2"].status == "too much memory", found["one", "4.2"]
    if "4.1" in answers:
        assert found["one", "4.1"].status == "right", found["one", "4.1"]


FORKS = "import os\nos.fork()\n"
WRITES_EVERYWHERE = """
import os, pathlib
for descriptor in range(1, 64):
    try:
        os.write(descriptor, b'right')
        os.close(descriptor)
    except OSError:
        continue
os.mkfifo("../4.2.begun")
pathlib.Path("../4.3.verdict").write_bytes(b"\\xffbest\\n")
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
    while not os.path.exists("lit"):
        time.sleep(0.01)
    os._exit(9)
threading.Thread(target=bomb, daemon=True).start()
"""
LIGHTS_IT = """
if "bomb" in globals():
    open("lit", "w").close()
    time.sleep(600)
"""
FORMULA = "class E(Exception): __module__ = None\nE.__name__ = '=1+1'\nraise E"


def test_hostile_answers_do_not_change_other_learners_verdicts(tmp_path, capsys):
    hostile = {
        "=forks": {**SOLUTIONS, "4.1": FORKS + SOLUTIONS["4.1"], "4.2": FORMULA},
        "honest": TYPED,
        "overwrites": {**SOLUTIONS, "4.1": OVERWRITES + SOLUTIONS["4.1"]},
        "raises": {"4.1": SURROGATE, "4.2": MUTE, "4.3": "raise SystemExit"},
        "waits": {"4.1": LEAVES_A_BOMB + SOLUTIONS["4.1"], "4.2": LIGHTS_IT + SOLUTIONS["4.2"]},
        "writes": {"4.1": WRITES_EVERYWHERE},
    }
    for who, answers in hostile.items():
        hand_in(tmp_path / "class", who, answers)
    arguments = ["--seconds", "30", "--csv", str(tmp_path / "all.csv")]
    class_check.main([str(tmp_path / "class"), *arguments])
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[1:7]}
    assert rows.keys() == hostile.keys()
    # What verdicts "overwrites" and "writes" get doesn't matter.
    assert rows["=forks"] == ["✓", "!", "✓", "2"] and rows["honest"] == ["✓", "✓", "✓", "3"]
    assert rows["waits"] == ["✓", "✓", "·", "2"], "4.2 must be right without the thread from 4.1"
    assert rows["raises"] == ["!", "!", "!", "0"]
    text = (tmp_path / "all.csv").read_text("utf-8")
    assert r"ValueError: \ud800 \x1b[2J xxx" in text and "Mute, whose message can't be read" in text
    assert "raises,4.3,error,SystemExit" in text
    assert max(map(len, text.splitlines())) < 3000
    assert "\n'=forks,4.2,error,'=1+1" in text, "a spreadsheet would evaluate it"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_killing_the_class_check_terminates_the_judges(tmp_path):
    waits = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    hand_in(tmp_path / "class", "one", {"4.1": waits + "time.sleep(600)"})
    arguments = [str(tmp_path / "class")]
    check = processes.context().Process(target=class_check.main, args=(arguments,))
    with processes.main_module_hidden():
        check.start()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    check.kill()
    check.join()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))


def wait_until(condition, limit_s=300):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.05)
