"""Runs of lessons' cells, each in a separate process.

The processes are forked from ``launch.run``'s forkserver, which has imported torch. Runs can't
affect each other.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from teaching import lessons
from teaching.lessons import Cell
from vgpu.launch import processes
from vgpu.launch.rank import as_if_fresh

# Cell ids and sources.
Run = tuple[tuple[str, str], ...]
PATCH = """
import unittest.mock
def patch(target, new): unittest.mock.patch(target, new).start()
"""


def run_of(cells: Iterable[Cell], before: str = "") -> Run:
    """Return the cells in order, with the code ``before`` ahead of the last one, as cell "before".

    It may call ``patch("torch.nn.DataParallel.scatter", new)`` to replace something in a module.
    """
    steps = [(cell.id, cell.source) for cell in cells]
    return (*steps[:-1], *([("before", PATCH + before)] if before else []), steps[-1])


def outcome(run: Run) -> tuple[str, str]:
    """Return the failed cell's id and its "<error type>: <message>", or two empty strings."""
    context = processes.context()
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        process = context.Process(target=_run, args=(run, Path(folder), sending))
        with processes.main_module_hidden():
            process.start()
        sending.close()
        try:
            failed, error = receiving.recv()
        except EOFError:
            process.join()
            failed, error = "process", f"ended with status {process.exitcode}"
        process.join()
    return failed, error


def _run(run: Run, folder: Path, sending) -> None:
    from teaching.cells import Shell

    # A forkserver for the lesson's ranks will remove multiprocessing's folder: don't share ours.
    multiprocessing.current_process()._config.pop("tempdir", None)
    as_if_fresh()
    os.chdir(lessons.ROOT / "notebooks")
    os.environ |= {"MPLBACKEND": "agg", "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    os.environ["COURSE_PROGRESS_DIR"] = str(folder / "progress")
    tempfile.tempdir = str(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    shell = Shell({})
    for name, source in run:
        try:
            shell.run(source, name)
        except BaseException as error:
            sending.send((name, f"{type(error).__name__}: {error}"))
            break
    else:
        sending.send(("", ""))
