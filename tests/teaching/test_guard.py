"""The guard above a judge: it exits as its child does, and terminates what the child started."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from teaching import guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

# Imported by path, because its package would import torch.
GUARD = f"import sys; sys.path.insert(0, {os.path.dirname(guard.__file__)!r}); import guard"


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ending", ["os._exit(7)", "os.abort()", "os.kill(os.getpid(), 9)"])
def test_the_guard_exits_with_the_status_of_its_child(ending):
    code = f"import os; {GUARD}; guard.enter(); {ending}"
    done = subprocess.run([sys.executable, "-c", code])
    plain = subprocess.run([sys.executable, "-c", f"import os; {ending}"])
    assert done.returncode == plain.returncode != 0


def test_the_guard_terminates_everything_on_request():
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
