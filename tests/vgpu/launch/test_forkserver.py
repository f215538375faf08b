"""The forkserver: started early, without importing torch in this process, and safe to fork from."""

import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys

import pytest
from cells import run

from vgpu import launch

FORKS = "forkserver" in multiprocessing.get_all_start_methods()


def test_warming_up_starts_the_forkserver():
    source = "def main(rank, world_size): return rank"
    server = multiprocessing.forkserver._forkserver
    launch.warm_up()
    started = server._forkserver_pid
    launch.warm_up()
    run(source, 1)
    assert started is not None and server._forkserver_pid == started


@pytest.mark.skipif(os.name != "posix", reason="process groups are specific to POSIX")
def test_a_kernel_that_exits_has_no_process_to_wait_for():
    """Jupyter waits up to 2.5 s for the kernel's whole process group, including processes that have
    exited.
    """
    source = """
import os, psutil
from vgpu import launch
launch.warm_up()
print([os.getpgid(child.pid) == os.getpgrp() for child in psutil.Process().children()])
"""
    found = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[False, False]\n"


@pytest.mark.skipif(not FORKS, reason="nothing to fork from")
def test_a_rank_collects_garbage_only_among_its_own_objects():
    """Going through torch's objects takes longer than most ranks run, and copies their pages."""
    source = """
    def main(rank, world_size):
        import gc
        return len(gc.get_objects()), gc.get_freeze_count(), gc.isenabled()
    """
    [(own, of_the_forkserver, enabled)] = run(source, 1)
    assert of_the_forkserver > 100_000 > 10 * own
    assert enabled
