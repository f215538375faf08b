"""Runs where the system has no forkserver, no process groups and no SIGKILL, or is macOS.

The lack is simulated for our own code (tests/support/elsewhere.py); .github/workflows/test.yml runs
the lessons on the systems themselves.
"""

import json
import subprocess
import sys

import elsewhere
import psutil
import pytest

SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
import torch
from vgpu import launch
from vgpu.launch import forkserver, guard

def total(rank, world_size):
    import torch.distributed as dist
    print("rank", rank)
    x = torch.ones(1) * rank
    dist.all_reduce(x)
    return x.item()

def raises(rank, world_size):
    if rank == 1:
        raise ValueError("the learner's mistake")
    time.sleep(1000)

def dies(rank, world_size):
    os._exit(3)

def hangs(rank, world_size):
    # Without this program's output, which would stay open as long as the child lives.
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    Path("child").write_text(str(child.pid))
    time.sleep(1000)

# What ranks need least.
forkserver.PRELOAD = ("torch", "vgpu.launch.rank")
found = {"platform": guard.sys.platform, "start": forkserver.context().get_start_method()}
found["results"] = launch.run(total, 2)
# Where nothing is forked each rank imports torch, so there are no more than it takes.
for function, ranks, limit_s in ((raises, 2, 60), (dies, 1, 60), (hangs, 1, 2)):
    try:
        launch.run(function, ranks, timeout_s=limit_s)
    except launch.LaunchError as error:
        found[function.__name__] = [type(error).__name__, str(error)]
found["child"] = int(Path("child").read_text())
print("found", json.dumps(found))
"""


@pytest.mark.parametrize(
    ("system", "platform", "start"),
    [("windows", "win32", "spawn"), ("macos", "darwin", "forkserver")],
)
def test_runs_end_well_and_badly_as_they_do_here(tmp_path, system, platform, start):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True,
        env=elsewhere.environment(system, tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    found = json.loads(last.removeprefix("found "))
    assert (found["platform"], found["start"]) == (platform, start)
    assert found["results"] == [1.0, 1.0]
    assert any("rank 0" in line for line in printed) and any("rank 1" in line for line in printed)
    assert found["raises"][0] == "RankRaised" and "the learner's mistake" in found["raises"][1]
    assert found["dies"][0] == "RankDied" and "rank 0" in found["dies"][1].lower()
    assert found["hangs"][0] == "RanksHung"
    left = [process for process in psutil.process_iter() if process.pid == found["child"]]
    running = [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    assert not running, "what a rank had started outlived the run"
