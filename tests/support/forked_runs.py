"""Runs of lessons' cells; what several begin with runs once, and where they part, each is forked.

``started`` starts the process that runs them. It has imported what lessons import, and so have the
ranks' forkserver and all forks. A run changes nothing for another one: its process ends with it, and
files that it wrote are taken away.
"""

import ast
import gc
import json
import multiprocessing.forkserver
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import tqdm

from teaching import lessons
from teaching.cells import Shell
from teaching.lessons import Cell
from vgpu import launch
from vgpu.launch.rank import renew_autograd

# The ids and the sources of cells.
Run = tuple[tuple[str, str], ...]
START = """
import sys
sys.path[:0] = {paths!r}
import gc; gc.disable()
import forked_runs
forked_runs.main()
"""
HAS_THREADS = 77  # a process's exit status
PATCH = """
import unittest.mock
def patch(target, new): unittest.mock.patch(target, new).start()
"""


def run_of(cells: Iterable[Cell], before: str = "") -> Run:
    """These cells in order, with ``before`` ahead of the last, where its id is "before".

    It may call ``patch("torch.nn.DataParallel.scatter", new)`` to replace something of a module.
    """
    steps = [(cell.id, cell.source) for cell in cells]
    return (*steps[:-1], *([("before", PATCH + before)] if before else []), steps[-1])


class Player:
    """Plays runs in the process that ``started`` has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._begun: list[Run] = []
        self._outcomes: dict[Run, tuple[str, str]] = {}

    def begin(self, runs: Iterable[Run]) -> None:
        """Begin runs that may have something in common; those that were begun before are left out."""
        new = [run for run in dict.fromkeys(runs) if run not in self._begun]
        numbered = list(enumerate(new, start=len(self._begun)))
        self._begun += new
        assert self._process.stdin
        print(json.dumps(numbered), file=self._process.stdin, flush=True)

    def outcome(self, run: Run) -> tuple[str, str]:
        """The id of the cell that failed and its "<kind>: <message>", or two empty strings."""
        if run not in self._begun:
            self.begin([run])
        assert self._process.stdout
        while run not in self._outcomes:
            line = self._process.stdout.readline()
            assert line, f"the process of the lessons' cells ended: {self._process.wait()}"
            number, *outcome = json.loads(line)
            self._outcomes.setdefault(self._begun[number], tuple(outcome))
        return self._outcomes[run]


@contextmanager
def started(folder: Path) -> Iterator[Player]:
    """The process that runs cells, in ``folder``."""
    paths = [str(lessons.ROOT), str(Path(__file__).parent)]
    with tempfile.TemporaryDirectory(prefix="runs-") as scratch:
        process = subprocess.Popen(
            [sys.executable, "-c", START.format(paths=paths), scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            # A thread of OpenMP's would be missing in a fork. The forkserver is killed with the rest
            # and leaves its sockets' folder.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "TMPDIR": scratch},
            text=True,
            start_new_session=True,
        )
        try:
            yield Player(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def main() -> None:
    """Be that process: a line of JSON asks for runs, and one for each run says how it ended."""
    folder = Path(sys.argv[1], "files")
    folder.mkdir()
    # Cells have a standard input and an output of their own.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    _prepare(folder)
    for line in requests:
        runs = {number: [tuple(step) for step in steps] for number, steps in json.loads(line)}
        played = _Played(Shell({}), folder, answers)
        played.in_fork(runs)


def _prepare(folder: Path) -> None:
    """Import what lessons import, here and in the ranks' forkserver; make this process one to fork."""
    launch.warm_up()
    # A fork is not the forkserver's parent, and may not ask whether it still runs.
    multiprocessing.forkserver.ensure_running = lambda: None
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    # A process with threads cannot be forked. Autograd starts one if there are virtual GPUs at its
    # first backward, though they run theirs in the caller's; tqdm's monitor is one.
    torch.ones(1, requires_grad=True).sum().backward()
    tqdm.tqdm.monitor_interval = 0
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["COURSE_PROGRESS_DIR"] = str(folder / "progress")
    import_what_lessons_do()
    gc.enable()


def import_what_lessons_do() -> None:
    """Import it all, and leave what lives then out of collections of garbage."""
    for statement in _imports():
        exec(statement, {})
    gc.collect()
    gc.freeze()


def _imports() -> list[str]:
    """The lessons' imports at the beginning of cells, each once."""
    code = [cell for path in lessons.NOTEBOOKS for cell in lessons.cells(path) if cell.is_code]
    trees = [ast.parse(cell.source) for cell in code if not cell.source.startswith(("%", "!"))]
    found = [s for tree in trees for s in tree.body if isinstance(s, ast.Import | ast.ImportFrom)]
    return list(dict.fromkeys(map(ast.unparse, found)))


class _Played:
    """Runs by their numbers, as the steps that are left of each."""

    def __init__(self, shell: Shell, folder: Path, answers) -> None:
        self.shell = shell
        self.folder = folder
        self.answers = answers

    def go_on(self, runs: dict[int, list[tuple[str, str]]]) -> None:
        """Run the steps that are left; the first one is done once for all that have it."""
        while runs:
            for number in [number for number, steps in runs.items() if not steps]:
                self.say(number, "", "")
                del runs[number]
            if not runs:
                return
            ways: dict[tuple[str, str], dict[int, list[tuple[str, str]]]] = {}
            for number, (first, *rest) in runs.items():
                ways.setdefault(first, {})[number] = rest
            *forked, last = ways.items()
            if forked and psutil.Process().num_threads() > 1:
                os._exit(HAS_THREADS)
            for step, rests in forked:
                self.in_fork({number: [step, *rest] for number, rest in rests.items()})
            (name, source), runs = last
            try:
                self.shell.run(source, name)
            except BaseException as error:
                for number in runs:
                    self.say(number, name, f"{type(error).__name__}: {error}")
                return

    def in_fork(self, runs: dict[int, list[tuple[str, str]]]) -> None:
        """Play runs in a process of their own, and leave no file of theirs.

        Where what they begin with leaves a thread, as autograd's are, it cannot be forked, and each
        begins for itself.
        """
        with _files_restored(self.folder):
            child = os.fork()
            if child == 0:
                self._be_fork(runs)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == HAS_THREADS:
            for number, steps in runs.items():
                self.in_fork({number: steps})
        elif status:
            for number in runs:
                self.say(number, "process", f"ended with status {status}")

    def _be_fork(self, runs: dict[int, list[tuple[str, str]]]) -> NoReturn:
        status = 1
        try:
            renew_autograd()
            self.go_on(runs)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def say(self, number: int, name: str, error: str) -> None:
        print(json.dumps([number, name, error]), file=self.answers, flush=True)


@contextmanager
def _files_restored(folder: Path) -> Iterator[None]:
    """Whatever the block does to files there, they are as before after it."""
    kept = folder.with_name(f"kept-{os.getpid()}")
    shutil.copytree(folder, kept)
    yield
    shutil.rmtree(folder)
    kept.rename(folder)
