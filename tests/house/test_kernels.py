"""Kernels that tests start: they begin and end sooner than others, and are the same otherwise."""

import contextlib
import json

import nbformat
import psutil
from nbclient import NotebookClient
from warm import kernels

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
RANKS_PATH = """
import os, sys
from helpers import launch
print([[path or os.getcwd() for path in sys.path]] == launch.run(lambda rank, ranks: sys.path, 1))
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
            said, interrupted = _kernel(folder, WHAT_IT_IS, TO_INTERRUPT)
        assert interrupted.ename == "KeyboardInterrupt"
        assert (folder / "done at the end").exists()
        folder.rename(tmp_path / way.__name__)
        pid, had, of_way[way] = json.loads(said.text)
        assert not psutil.pid_exists(pid)
        assert had == ([] if way is contextlib.nullcontext else ["torch", "torch._dynamo"])
    new, forked = of_way.values()
    assert new == forked
    assert new["program"].endswith("support/ending/kernels/python3/kernel.py")


def test_ranks_of_a_forked_kernel_import_from_its_folder(tmp_path):
    with kernels.in_use():
        (said,) = _kernel(tmp_path, RANKS_PATH)
    assert said.text == "True\n"


def test_lessons_get_forked_kernels_and_nothing_else_does():
    factory = kernels.KernelProvisionerFactory.instance()
    assert factory.default_provisioner_name == "local-provisioner"
    with kernels.in_use():
        assert factory.default_provisioner_name == "forked"
    assert "forked" not in factory.provisioners
