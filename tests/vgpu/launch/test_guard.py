"""A rank's child processes end with the call, even in other sessions or without its environment."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext

import psutil
import pytest
from cells import cell

from vgpu import launch
from vgpu.launch import guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

# Imported by path, because its package would import torch.
GUARD = f"import sys; sys.path.insert(0, {os.path.dirname(guard.__file__)!r}); import guard"

STARTS = """
def daemon():
    # Nothing ties it to the rank: no session, no group, no parent.
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    return int(os.read(read, 20))
"""


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("return", None),
        ("raise ValueError", launch.RankRaised),
        ("os._exit(0)", launch.RankDied),
        ("os.kill(os.getpid(), signal.SIGKILL)", launch.RankDied),
        ("time.sleep(600)", launch.RanksHung),
    ],
)
def test_a_process_that_left_its_session_ends_with_the_call(ending, error, tmp_path):
    body = f"""
def main(rank, world_size, folder):
    pid = daemon()
    os.kill(pid, 0)  # it runs
    (folder / str(pid)).touch()
    {ending}
"""
    function = cell(STARTS + body)["main"]
    timeout_s = 1.5 if error is launch.RanksHung else 300.0
    with pytest.raises(error) if error else nullcontext():
        launch.run(function, 2, tmp_path, timeout_s=timeout_s)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert started and not any(map(is_alive, started))


def test_a_child_has_time_to_clean_up_when_its_rank_ends(tmp_path):
    names = cell(
        """
        import subprocess

        def main(rank, world_size, path):
            # The end of its input tells it that the rank is gone.
            subprocess.Popen(["sh", "-c", f"cat; touch {path}"], stdin=subprocess.PIPE)
        """
    )
    launch.run(names["main"], 1, tmp_path / "tidied")
    assert (tmp_path / "tidied").exists()


@pytest.mark.parametrize("ending", ["os._exit(7)", "os.abort()", "os.kill(os.getpid(), 9)"])
def test_the_guard_exits_with_the_status_of_its_child(ending):
    code = f"import os; {GUARD}; guard.enter(); {ending}"
    done = subprocess.run([sys.executable, "-c", code])
    plain = subprocess.run([sys.executable, "-c", f"import os; {ending}"])
    assert done.returncode == plain.returncode != 0


def test_the_guard_ends_everything_on_request():
    code = f"""
import os, subprocess, time
{GUARD}
guard.enter()
child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={{}})
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        below = [int(number) for number in process.stdout.readline().split()]
        assert process.pid not in below and all(map(is_alive, below))
        guard.end(process.pid)
        process.wait(60)
    assert not any(map(is_alive, below))
    assert process.returncode == -signal.SIGKILL
