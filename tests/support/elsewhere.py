"""Lets the package see another system than the one it runs on: what Windows or macOS lacks.

Only our own modules look through it; Python and torch see the system that is there. That shows
which way our code takes elsewhere, and that the way leads somewhere. It does not show what that
system itself would do: paths, its console and its process table stay those of this one.

A Python that starts with ``environment("windows", folder)`` looks so, and so do its children.
"""

import builtins
import importlib.machinery
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = ("vgpu", "helpers", "teaching")
VARIABLE = "COURSE_TESTS_ELSEWHERE"

_SIGNALS = "SIGKILL SIGHUP SIGCHLD SIGALRM SIGUSR1 SIGUSR2 SIGSTOP SIGCONT SIGQUIT"
_SIGNAL_CALLS = "pthread_sigmask pthread_kill sigwait sigtimedwait sigwaitinfo alarm setitimer"
_POSIX_CALLS = (
    "fork forkpty killpg setsid setpgid getpgid geteuid getuid getgid sched_getaffinity wait "
    "waitid WNOHANG WIFSIGNALED WTERMSIG mkfifo statvfs uname getloadavg sysconf nice chown"
)

# For each system: modules that are missing, names that modules lack, and names that differ.
SYSTEMS: dict[str, tuple[set[str], dict[str, set[str]], dict[str, dict[str, Any]]]] = {
    "windows": (
        {"fcntl", "resource", "pwd", "grp", "termios"},
        {"os": {*_POSIX_CALLS.split()}, "signal": {*_SIGNALS.split(), *_SIGNAL_CALLS.split()}},
        {
            "os": {"name": "nt"},
            "sys": {"platform": "win32"},
            "multiprocessing": {"get_all_start_methods": lambda: ["spawn"]},
        },
    ),
    "macos": (
        set(),
        {
            "os": {"sched_getaffinity", "sched_setaffinity"},
            "signal": {"sigtimedwait", "sigwaitinfo"},
        },
        {
            "sys": {"platform": "darwin"},
            "multiprocessing": {"get_all_start_methods": lambda: ["spawn", "fork", "forkserver"]},
        },
    ),
}


def environment(system: str, folder: Path) -> dict[str, str]:
    """The environment of a Python that is to see ``system``; ``folder`` keeps a file for it."""
    # Each process imports torch, which takes a fifth less where nobody looks for garbage meanwhile.
    start = "import gc, elsewhere\ngc.disable()\nelsewhere.install()\n"
    (folder / "sitecustomize.py").write_text(start)
    here = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, here))
    return dict(os.environ, PYTHONPATH=path, **{VARIABLE: system})


def install() -> None:
    """Show our modules the system that the environment names, from here on."""
    missing, lacking, different = SYSTEMS[os.environ[VARIABLE]]
    seen = {
        name: _Seen(name, lacking.get(name, set()), different.get(name, {}))
        for name in {*lacking, *different}
    }
    plain = builtins.__import__

    def importing(name: str, *args: Any) -> Any:
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        found = plain(name, *args)
        return seen.get(found.__name__, found)

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module: ModuleType) -> None:
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": importing}
            super().exec_module(module)

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name: str, *args: Any) -> Any:
            spec = super().find_spec(name, *args) if name.partition(".")[0] in OURS else None
            if spec and spec.origin:
                spec.loader = Loader(name, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder)


class _Seen(ModuleType):
    """A module with some names missing and some others; setting a name sets it in the module."""

    def __init__(self, name: str, lacking: set[str], different: dict[str, Any]) -> None:
        vars(self).update(_plain=sys.modules.get(name) or __import__(name))
        vars(self).update(_lacking=lacking, **different)

    def __getattr__(self, name: str) -> Any:
        if name in self._lacking:
            raise AttributeError(f"this system's module has no attribute {name!r}")
        return getattr(self._plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._plain, name, value)


assert multiprocessing  # it must be there before our modules ask for it
