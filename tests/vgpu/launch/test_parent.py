"""The parent process: when killed, it leaves nothing behind; under nbmake, it shows the output."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from rights import needs_shared_memory

# Only what ranks need: a forkserver with fewer imports starts a second faster.
FEW_IMPORTS = """
from vgpu.launch import processes
processes.PRELOAD = ("torch", "vgpu.launch.processes")
"""
PARENT = f"""{FEW_IMPORTS}
import os, time
import torch
from vgpu import launch

def stay(rank, world_size):
    # Processes that a rank started must be killed, too.
    loader = torch.utils.data.DataLoader(torch.arange(8.0), num_workers=1)
    batches = iter(loader)
    next(batches)
    print("ready", flush=True)
    time.sleep(1000)

launch.run(stay, 2, timeout_s=None)
"""


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, what, limit_s=300):
    """Poll for a condition; after the time limit, fail and say what didn't happen."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"timed out waiting for {what}"
        time.sleep(0.02)


def litter(folder):
    """Return a temporary folder's contents, except the cache that torch._dynamo creates."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture
def short_folder():
    """Data loader workers open sockets in TMPDIR; a test folder's path is too long for that."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def test_a_temporary_folder_may_have_a_path_too_long_for_a_socket(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        f"{FEW_IMPORTS}from vgpu import launch\n"
        "print(launch.run(lambda rank, world_size: rank, 2))\n"
    )
    temporary = tmp_path / ("long" * 25)
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[0, 1]\n", done.stderr
    assert not litter(temporary)


@needs_shared_memory
@pytest.mark.parametrize("killed", ["parent", "group"])
def test_a_killed_parent_leaves_no_processes_files_or_shared_memory(short_folder, killed):
    # A script without a __main__ guard, on purpose: its ranks must not run it again.
    script = short_folder / "parent.py"
    script.write_text(PARENT)
    temporary = short_folder / "tmp"
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        for _ in range(2):
            assert parent.stdout.readline().endswith("ready\n")
        started = psutil.Process(parent.pid).children(recursive=True)
        assert len(started) >= 6, "forkserver, tracker, two ranks, two loader workers"
        assert list(temporary.glob("launch-*"))
    finally:
        if killed == "parent":
            parent.kill()
        else:
            os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
    wait_until(lambda: not any(map(alive, started)), f"the end of {started}")
    wait_until(lambda: not litter(temporary), "an empty temporary folder")
    # torch names its shared memory after the process that made it: torch_<pid>_<number>.
    ended = {str(process.pid) for process in started}
    assert not [p for p in Path("/dev/shm").glob("torch_*") if p.name.split("_")[1] in ended]


def test_ranks_print_to_the_cell_under_nbmake(tmp_path):
    cells = [
        FEW_IMPORTS + "from vgpu import launch",
        "def greet(rank, world_size):\n    print('hello from', rank)\n    return rank",
        "assert launch.run(greet, 2) == [0, 1]",
        "def fails(rank, world_size):\n    if rank == 1:\n        return missing\n"
        "try:\n    launch.run(fails, 2)\nexcept launch.RankRaised as error:\n    print(error)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    path = tmp_path / "scratch.ipynb"
    nbformat.write(notebook, path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "-p", "no:cacheprovider", path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = ["".join(o["text"] for o in c["outputs"]) for c in nbformat.read(path, 4).cells]
    assert sorted(shown[2].splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert "Cell In[4], line 3, in fails\n    return missing" in shown[3]
