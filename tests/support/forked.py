"""A program in a process that is forked, like a rank, from what has imported torch: there at once.

Python itself, started anew, would import torch for two seconds. For tests of what a program does;
that it starts without help is for another test to try.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import forkserver
from helpers.launch.rank import as_if_fresh


def run(program, *arguments, cwd=None):
    """``subprocess.run`` of a script, or of the module of a name, with its output and errors."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start(program, *arguments, output=output, errors=errors, cwd=cwd)
        process.join()
        return subprocess.CompletedProcess(
            [program, *arguments], process.exitcode, output.read_text(), errors.read_text()
        )


def start(program, *arguments, output, errors, cwd=None):
    """The same, begun: a process of multiprocessing's, which writes into files or to a terminal."""
    job = (program, list(map(str, arguments)), (output, errors), cwd or os.getcwd(), {**os.environ})
    process = forkserver.context().Process(target=_become, args=job)
    with forkserver.main_module_hidden():
        process.start()
    return process


def _become(program, arguments, streams, cwd, environment):
    for number, path in enumerate(streams, start=1):
        stream = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOCTTY", 0))
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # What it starts itself is started in the usual way, not as this process was, and a forkserver of
    # its own, which removes multiprocessing's folder when it ends, has one of its own.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process()._config.pop("tempdir", None)
    as_if_fresh()
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
