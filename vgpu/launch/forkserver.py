"""The process that ranks are forked from: it imports torch once, for all of them."""

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
from unittest import mock

PRELOAD = (
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "torch.distributed.checkpoint",
    "IPython",  # cells that ranks unpickle often use it
    "vgpu.launch.rank",
)
"""The modules that the forkserver imports once, for all ranks, if they're installed."""

SOCKETS_FOLDER = "LAUNCH_SOCKETS_FOLDER"
"""The environment variable that names the folder that a forkserver removes when it exits."""

# A socket's path can have 103 bytes on macOS, 107 on Linux, including the 32 bytes of
# "/pymp-xxxxxxxx/listener-xxxxxxxx".
_LONGEST_TMPDIR_BYTES = 103 - 32
_main_lock = threading.Lock()


def warm_up() -> None:
    """Start importing torch for the ranks in the background, so the first run doesn't have to wait.

    Returns immediately. Does nothing where the system has no forkserver (Windows).
    """
    context()


def context() -> Any:
    """Return the multiprocessing context: a running forkserver, or spawn if the system has none."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(list(PRELOAD))
    _ensure_running()
    return forking


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from importing the parent's main script again in each child.

    The function is pickled by value, so the child doesn't need the script. A script without
    ``if __name__ == "__main__"`` would start more ranks from each rank.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _ensure_running() -> None:
    spawn = mock.patch.object(multiprocessing.util, "spawnv_passfds", _spawn)
    with main_module_hidden(), spawn:
        # A parent that's killed doesn't remove the folder of multiprocessing's sockets. The
        # forkserver exits a moment later, and removes the folder that this variable names.
        os.environ[SOCKETS_FOLDER] = _sockets_folder()
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ[SOCKETS_FOLDER]


def _spawn(path: str, arguments: list[str], passed: list[int]) -> int:
    """Start the forkserver or multiprocessing's resource tracker, in a process group of its own.

    When a kernel shuts down, it sends SIGTERM to its process group and waits until the group is
    empty. The tracker ignores SIGTERM, and a dead forkserver stays a zombie of the kernel, so each
    shutdown would take 2.5 s. Both exit on their own when their parent does.
    """
    # Importing creates millions of objects, none of them garbage; collecting would take a fifth of
    # the time. vgpu.launch.rank, the last import, turns the garbage collector back on.
    *options, code = arguments
    inherited = [fd for fd in passed if not os.get_inheritable(fd)]
    for fd in inherited:
        os.set_inheritable(fd, True)
    try:
        command = [*options, f"import gc; gc.disable(); {code}"]
        return os.posix_spawn(path, command, os.environ, setpgroup=0)
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)


def _sockets_folder() -> str:
    """Return multiprocessing's temporary folder, in /tmp if TMPDIR is too long.

    A socket's path is limited to about a hundred bytes. Python uses TMPDIR, however long it is, and
    fails with "AF_UNIX path too long" when the forkserver starts.
    """
    too_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR_BYTES
    folder = "/tmp" if too_long and os.path.isdir("/tmp") else tempfile.tempdir
    with mock.patch.object(tempfile, "tempdir", folder):
        return multiprocessing.util.get_temp_dir()
