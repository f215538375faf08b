"""Calls in several processes: their results, their errors, and that none of them outlives the block."""

import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from vgpu.launch import launcher
from vgpu.plan.workers import WORKER_BYTES, at_once, workers


@pytest.mark.parametrize("processes", [1, 2])
def test_results_have_their_tasks_index(processes):
    with workers(processes) as each:
        assert dict(each(math.sqrt, [(4,), (9,), (16,)])) == {0: 2, 1: 3, 2: 4}
        assert dict(each(math.sqrt, [])) == {}


def test_a_process_computes_with_one_thread_and_is_not_this_one():
    with workers(2) as each:
        assert dict(each(torch.get_num_threads, [()])) == {0: 1}
        pids = set(dict(each(os.getpid, [()] * 4)).values())
    assert pids and os.getpid() not in pids
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_as_from_a_plain_call(processes):
    with pytest.raises(ValueError, match="invalid literal"), workers(processes) as each:
        list(each(int, [("1",), ("one",)]))


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="has died"), workers(2) as each:
        list(each(os._exit, [(3,)]))


def test_an_interrupt_ends_what_runs():
    began_s, pids = time.monotonic(), []
    with pytest.raises(KeyboardInterrupt), workers(2) as each:
        pids += dict(each(os.getpid, [()])).values()
        tasks = each(time.sleep, [(0,), (600,), (600,)])
        next(tasks)
        raise KeyboardInterrupt
    assert not any(map(psutil.pid_exists, pids))
    assert time.monotonic() - began_s < 300  # nobody waited for those that slept


# Without an `if __name__ == "__main__"`: no process imports it once more.
SCRIPT = """
import os, signal
from vgpu.plan.workers import workers
with workers(2) as each:
    print(*{pid for _, pid in each(os.getpid, [()] * 2)}, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_no_process_outlives_a_script_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    until_s = time.monotonic() + 300
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < until_s, f"{pids} live on"
        time.sleep(0.05)


def test_as_many_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 4)
    for free_bytes, processes in ((2**40, 4), (3 * WORKER_BYTES, 3), (0, 1)):
        free = SimpleNamespace(available=free_bytes)
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: free)
        assert at_once() == processes
    monkeypatch.setattr(launcher, "cores", lambda: 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    assert at_once() == 1
