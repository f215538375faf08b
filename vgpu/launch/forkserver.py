"""The process that ranks are forked from: it imports torch once, for all of them.

Nothing here needs torch, so a lesson that calls ``warm_up`` before its own imports has both done at
once, each on a core.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PRELOAD = (
    "vgpu.launch.gc_off",
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "torch.distributed.checkpoint",
    "IPython",  # the checks of exercises import it
    "vgpu.launch.rank",
)
"""What the forkserver imports once, for all ranks; it passes over what is not installed.

The first lets them come without a search for garbage; the last freezes what there is.
"""

SOCKETS_FOLDER = "LAUNCH_SOCKETS_FOLDER"
"""The environment variable that names the folder a forkserver removes when it ends."""

# 103 bytes on macOS, 107 on Linux, less "/pymp-xxxxxxxx/listener-xxxxxxxx".
_LONGEST_SOCKETS_PARENT = 103 - 32
_starting = threading.Lock()


def warm_up() -> None:
    """Begin to import torch for the ranks, in the background: the first run then starts at once.

    Returns immediately. Nothing happens where the system has no forkserver (Windows).
    """
    context()


def context() -> Any:
    """How to start processes: from a forkserver that has imported torch, if the system has one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(list(PRELOAD))
    with main_module_hidden(), _started_in_own_groups():
        # A parent that is killed does not remove the folder of multiprocessing's sockets. The
        # forkserver, which outlives it by a moment, learns its name here and does.
        os.environ[SOCKETS_FOLDER] = _sockets_folder()
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ[SOCKETS_FOLDER]
    return forking


@contextmanager
def _started_in_own_groups() -> Iterator[None]:
    """The forkserver and multiprocessing's resource tracker, each in a process group of its own.

    A kernel that is shut down or restarted sends SIGTERM to the rest of its group, and waits until
    no more is there. But the tracker ignores it, and the dead forkserver waits for its parent to ask
    how it ended: 2.5 s went by each time. Both end by themselves when their parent does.
    """
    util: Any = multiprocessing.util
    plain = util.spawnv_passfds
    util.spawnv_passfds = _spawn_in_own_group
    try:
        yield
    finally:
        util.spawnv_passfds = plain


def _spawn_in_own_group(path: str, arguments: list[str], passed: list[int]) -> int:
    kept = [file for file in passed if not os.get_inheritable(file)]
    for file in kept:
        os.set_inheritable(file, True)
    try:
        return os.posix_spawn(path, arguments, os.environ, setpgroup=0)
    finally:
        for file in kept:
            os.set_inheritable(file, False)


def _sockets_folder() -> str:
    """multiprocessing's own folder, made in /tmp if a socket's name would be too long elsewhere.

    A system allows a socket about a hundred bytes for its path. Python takes TMPDIR, however long,
    and fails with "AF_UNIX path too long" when the forkserver starts.
    """
    set_by_user = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_SOCKETS_PARENT and os.path.isdir("/tmp"):
        tempfile.tempdir = "/tmp"
    try:
        return multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = set_by_user


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """multiprocessing imports the parent's main script once more in each child.

    The function travels by value, so that nothing of it is needed; a script without an
    ``if __name__ == "__main__"`` would start ranks from its ranks.
    """
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
