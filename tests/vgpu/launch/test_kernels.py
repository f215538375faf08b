"""Kernels that tests start: they begin and end sooner than others, and are the same otherwise."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from warm import kernels

from teaching.lessons import ROOT

WHAT_IT_IS = """
import gc, json, multiprocessing, os, signal, sys, threading, warnings
before = sorted(set(sys.modules) & {"torch", "torch._dynamo"})
import atexit, pathlib
atexit.register(pathlib.Path("done at the end").touch)
import torch
print(json.dumps([os.getpid(), before, {
    "path": sys.path,
    "program": sys.argv[0],
    "folder": os.getcwd(),
    "environment": {k: v for k, v in os.environ.items() if k != "JPY_PARENT_PID"},
    "start method": multiprocessing.get_start_method(allow_none=True),
    "garbage": [gc.isenabled(), gc.get_threshold()],
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "threads": len(threading.enumerate()),
    "warnings": sorted(str(each) for each in warnings.filters if "SymPy" not in str(each)),
    "torch": [torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype().itemsize],
    "main": [sys.modules["__main__"].__name__, __name__],
}]))
"""
WHAT_A_RANK_IS = """
import multiprocessing.forkserver as server
from vgpu import launch
CHANCE = "JPY_PARENT_PID", "MASTER_PORT"
def about(rank, world_size):
    return {
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": {k: v for k, v in os.environ.items() if k not in CHANCE},
        "garbage": [gc.isenabled(), gc.get_freeze_count() > 10**5],
        "threads": len(threading.enumerate()),
        "a group of its own in the session": [os.getpgid(pid) == pid, os.getsid(pid) == session],
    }
sys.path.append("/added in a cell")
os.environ["SET_IN_A_CELL"] = "1"
launch.warm_up()
pid, session = server._forkserver._forkserver_pid, os.getsid(0)
address = server._forkserver._forkserver_address
print(json.dumps([pid, address, launch.run(about, 2)]))
"""
WITHOUT_ITS_FORKSERVER = """
os.kill(pid, signal.SIGKILL)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(launch.run(lambda rank, world_size: rank, 2))
"""
TO_INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass"


def _kernel(folder, *cells):
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],
        allow_errors=True,
    )
    client.execute()
    return [cell.outputs[0] for cell in notebook.cells]


def test_a_forked_kernel_is_what_a_new_one_is_and_ends_as_it_does(tmp_path):
    of_way = {}
    for way in contextlib.nullcontext, kernels.in_use:
        folder = tmp_path / "same"
        folder.mkdir()
        with way():
            said, of_rank, interrupted = _kernel(folder, WHAT_IT_IS, WHAT_A_RANK_IS, TO_INTERRUPT)
        assert interrupted.ename == "KeyboardInterrupt"
        assert (folder / "done at the end").exists()
        folder.rename(tmp_path / way.__name__)
        pid, had, kernel = json.loads(said.text)
        forkserver, address, ranks = json.loads(of_rank.text)
        of_way[way] = kernel, ranks
        assert not psutil.pid_exists(pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(forkserver).wait(10)
        assert not Path(address).parent.exists()
        assert had == ([] if way is contextlib.nullcontext else ["torch", "torch._dynamo"])
    new, forked = of_way.values()
    assert new == forked
    assert new[0]["program"].endswith("support/ending/kernels/python3/kernel.py")


def test_a_forked_kernel_whose_forkserver_is_killed_starts_another(tmp_path):
    with kernels.in_use():
        *_, again = _kernel(tmp_path, WHAT_IT_IS, WHAT_A_RANK_IS, WITHOUT_ITS_FORKSERVER)
    assert again.text == "[0, 1]\n"


def test_lessons_get_forked_kernels(tmp_path):
    """They lie outside this folder, where pytest asks its conftest.py for few hooks."""
    cell = nbformat.v4.new_code_cell("import sys\nassert 'torch' in sys.modules")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "lesson.ipynb")
    options = "-q", "-p", "no:cacheprovider", "--nbmake", "-k=lesson.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__, tmp_path / "lesson.ipynb"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_nothing_else_does():
    factory = kernels.KernelProvisionerFactory.instance()
    assert factory.default_provisioner_name == "local-provisioner"
    with kernels.in_use():
        assert factory.default_provisioner_name == "forked"
    assert "forked" not in factory.provisioners
