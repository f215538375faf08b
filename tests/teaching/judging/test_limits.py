"""An answer ends with its own process: endless, greedy or hostile, it takes no other one along."""

import sys
import time

import pytest
from learners import LESSON, SOLUTIONS, hand_in, is_alive, statuses

from teaching import class_check, lessons
from vgpu.launch import forkserver


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
