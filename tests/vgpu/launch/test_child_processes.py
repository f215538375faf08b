"""Processes that a rank starts end with the call, whether the rank returns, fails or hangs."""

import os
import time
from contextlib import nullcontext

import psutil
import pytest
from cells import cell

from vgpu import launch


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
@pytest.mark.skipif(
    os.name == "nt", reason="Windows doesn't know the descendants of a process that has ended"
)
def test_a_child_process_ends_with_the_call(ending, error, tmp_path):
    body = f"""
import subprocess

def main(rank, world_size, folder):
    child = subprocess.Popen(["sleep", "600"])
    (folder / str(child.pid)).touch()
    {ending}
"""
    timeout_s = 1.5 if error is launch.RanksHung else 300.0
    with pytest.raises(error) if error else nullcontext():
        launch.run(cell(body)["main"], 2, tmp_path, timeout_s=timeout_s)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert started
    end_s = time.monotonic() + 60
    while any(map(is_alive, started)):  # a killed process takes a moment to exit
        assert time.monotonic() < end_s
        time.sleep(0.02)
