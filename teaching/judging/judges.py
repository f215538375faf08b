"""Where judges come from: a process that has imported what lessons import forks each of them.

A judge is there in a tenth of a second then, where it would take four to import PyTorch. Windows
cannot fork: there each judge starts by itself.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from teaching import lessons

MARK = "COURSE_JUDGE"
"""The environment variable whose value is a judge's own, and that of all it starts."""

_FORKS = hasattr(os, "fork")
_PRELOAD = (
    "torch._dynamo",
    "torchvision",
    "helpers.data",
    "helpers.devices",
    "vgpu.plan",
    "helpers.plots",
    "helpers.train",
    "helpers.widgets",
    "teaching.judging.judge",
)
_LOOK_EVERY_S = 0.02


class Process(Protocol):
    """What limits need of a judge's process; ``subprocess.Popen`` has it."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def started(folder: Path, mark: str) -> Process:
    """A judge for the job in ``folder / "job"``; it works in ``folder / "home"``.

    What it says before it is ready stands in ``folder / "errors"``. ``mark`` has 32 characters.
    """
    if _FORKS:
        return _server.fork(folder, mark)
    with (folder / "job").open() as stdin, (folder / "errors").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "teaching.judging.judge"],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=folder / "home",
            env=_environment(folder / "home", mark),
        )


class _Server:
    """The process that forks judges, started for the first one; it ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def fork(self, folder: Path, mark: str) -> "_Forked":
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
            server = self._process
        pid = self._ask(server, {"folder": str(folder), "mark": mark})
        return _Forked(pid, partial(self._ask, server, {"ended": pid}))

    def _ask(self, server: subprocess.Popen[str], question: dict[str, Any]) -> Any:
        assert server.stdin and server.stdout
        with self._lock:
            server.stdin.write(json.dumps(question) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        if not answer:
            raise ConnectionError(f"the process {server.pid}, which starts the judges, has ended")
        return json.loads(answer)


class _Forked:
    """A judge that another process has forked, and waits for."""

    def __init__(self, pid: int, ask: partial[int | None]) -> None:
        self.pid = pid
        self._ask = ask
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                self._code = self._ask()
            except (OSError, ValueError):
                self._code = -signal.SIGKILL  # judges end with the process that forked them
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        until_s = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(f"judge {self.pid}", timeout or 0.0)
            time.sleep(_LOOK_EVERY_S)
        return code

    def kill(self) -> None:
        # Until it has been waited for, the id is nobody else's.
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


_server = _Server()


def _start() -> "subprocess.Popen[str]":
    home = tempfile.TemporaryDirectory(prefix="judges-", ignore_cleanup_errors=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "teaching.judging.judges"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=home.name,
        env=_environment(Path(home.name), "0" * 32),
        start_new_session=True,
    )

    def end() -> None:
        with server, suppress(BrokenPipeError):
            server.communicate()
        home.cleanup()

    atexit.register(end)
    return server


def _environment(home: Path, mark: str) -> dict[str, str]:
    # No variable of the teacher's that an answer need not see.
    wanted = ("PATH", "LANG", "LD_LIBRARY_PATH", "SYSTEMROOT", "VGPU_DEVICES")
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    return kept | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "COURSE_PROGRESS_DIR": str(home),
        MARK: mark,
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        # An answer may hold "%pip install": nothing is installed into the teacher's Python.
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(lessons.ROOT),
    }


def _serve() -> None:
    """Fork judges and say how they ended, as the parent asks; until it is gone."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    # Others see a process's environment as the memory that it started with.
    mark_shown = libc.getenv(MARK.encode())
    gc.disable()  # importing makes millions of objects, none of them garbage
    *_, judge = (importlib.import_module(name) for name in _PRELOAD)
    # A judge's collections of garbage leave out what it was forked with, garbage too.
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        match json.loads(line):
            case {"folder": folder, "mark": mark}:
                answer: int | None = os.fork()
                if answer == 0:
                    ctypes.memmove(mark_shown, mark.encode(), len(mark))
                    _judge(judge.main, Path(folder), mark)
            case {"ended": pid}:
                ended, status = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(answer), flush=True)
    # Taking torch down in an orderly way takes seconds.
    os._exit(0)


def _judge(main: Callable[[dict[str, Any]], object], folder: Path, mark: str) -> NoReturn:
    try:
        os.setsid()
        with (folder / "errors").open("w") as errors, open(os.devnull, "r+") as nowhere:
            for file, descriptor in ((nowhere, 0), (nowhere, 1), (errors, 2)):
                os.dup2(file.fileno(), descriptor)
        home = folder / "home"
        os.chdir(home)
        environment = _environment(home, mark)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # as the environment has it now
        main(json.loads((folder / "job").read_text(encoding="utf-8")))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever happens, this process does not go on as the server


if __name__ == "__main__":
    _serve()
