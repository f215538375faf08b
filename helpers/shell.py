"""Run command lines in real shells and return their output, for lessons."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """The result of one command line: its exit status, stdout and stderr."""

    line: str
    status: int
    output: str
    errors: str


def run_lines(
    lines: Sequence[str], files: Mapping[str, str], timeout_s: float = 120
) -> list[Result]:
    """Run each line in its own POSIX shell, all at the same time.

    The shells start in a temporary folder with ``files`` (name → text). ``python`` is the current
    interpreter, and CUDA_VISIBLE_DEVICES and FORCE_COLOR are unset unless a line sets them.
    Processes that are still running at the end are killed (on Windows, only the shells). Raises
    FileNotFoundError if there's no shell, and subprocess.TimeoutExpired if the lines together take
    longer than ``timeout_s``.
    """
    shell = _find_shell()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        # A symlink to the interpreter would lose its virtual environment; a script doesn't.
        python = Path(folder, "python")
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        environment = dict(os.environ, PATH=folder + os.pathsep + os.environ.get("PATH", ""))
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        # Jupyter sets this variable, and Python 3.13 obeys it even in a pipe.
        environment.pop("FORCE_COLOR", None)
        started: list[subprocess.Popen[str]] = []
        end_s = time.monotonic() + timeout_s
        try:
            for line in lines:
                started.append(_start(shell, line, folder, environment))
            return [_finish(*pair, end_s) for pair in zip(lines, started, strict=True)]
        except subprocess.TimeoutExpired as expired:
            expired.timeout = timeout_s  # not the time left for this line
            raise
        finally:
            for process in started:
                _stop(process)


def _start(
    shell: str, line: str, folder: str, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [shell, "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The shell gets its own process group, so that everything it starts can be killed with it.
        start_new_session=True,
    )


def _finish(line: str, process: subprocess.Popen[str], end_s: float) -> Result:
    output, errors = process.communicate(timeout=max(0, end_s - time.monotonic()))
    return Result(line, process.returncode, output.strip(), errors.strip())


def _stop(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        # Do this even if the shell has exited: what it left running is still in its group.
        with suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left in it
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    # This closes the pipes of processes whose output wasn't read to the end.
    process.communicate()


def _find_shell() -> str:
    """Return the path to ``sh``; on Windows, the one that comes with Git will do."""
    found = shutil.which("sh")
    git = shutil.which("git")
    if found is None and git is not None:
        found = shutil.which("sh", path=str(Path(git).parents[1] / "bin"))
    if found is None:
        raise FileNotFoundError(
            "no POSIX shell (sh) was found on PATH, and the lesson runs its commands in one. On "
            "Windows, install Git for Windows, or run the course inside WSL."
        )
    return found
