"""A process that nothing it starts can outlive, wherever that has gone.

A child may begin a session of its own and fork twice: no process group and no list of children has
it then, and as an orphan it belongs to init. Linux lets a process adopt such orphans
(PR_SET_CHILD_SUBREAPER, man 2 prctl), so ``enter`` puts a guard above the caller that does so, and
that ends whatever is left below it. Other systems have nothing of the kind: there ``end`` reaches
the process and its group, or on Windows its descendants, and what has left those stays.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

import psutil

if sys.platform == "linux":
    import resource

ADOPTS = sys.platform == "linux"
"""Whether a guard ends everything below it, whatever that did to leave."""

GRACE_S = 0.5
"""For processes to notice that the one above them has ended, and to clean up."""

_SUBREAPER, _SIGNAL_ON_PARENTS_DEATH = 36, 1  # linux/prctl.h
_NOTICED = (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM) if sys.platform == "linux" else ()
# Far more than any of them takes, unless a driver or a network disk holds it.
_END_S = 5.0


def enter(orphaned_s: float = _END_S) -> None:
    """Continue as the child of a guard, in a session of its own; the guard keeps this process's id.

    The guard ends as the child does, after everything that the child has started. It ends them all
    at SIGTERM; when its own parent dies, it does so as well, but lets them end in their own way
    first, for ``orphaned_s`` seconds at most. Does nothing on systems other than Linux. The
    process must not have threads.
    """
    if sys.platform != "linux":
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOTICED)
    _prctl(_SUBREAPER, 1)
    _prctl(_SIGNAL_ON_PARENTS_DEATH, signal.SIGHUP)
    child = os.fork()
    if child == 0:
        _prctl(_SIGNAL_ON_PARENTS_DEATH, signal.SIGKILL)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    try:
        _end_as(_guard(child, orphaned_s))
    finally:
        os._exit(1)  # whatever happens, only the child goes on


def end(pid: int) -> None:
    """End the process with that id, which has called ``enter``, and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":
            os.kill(pid, signal.SIGTERM)
        elif hasattr(os, "killpg"):
            # Very early the group does not exist yet, later it may be empty.
            os.killpg(pid, signal.SIGKILL)
        else:
            with suppress(psutil.Error):
                top = psutil.Process(pid)
                _kill([top, *top.children(recursive=True)])


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has just ended, or belongs to another user
            process.kill()


def _guard(child: int, orphaned_s: float) -> int:
    """Wait until the child ends or is to be ended; its status once nothing of it is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A pipe's end tells its reader of the child's end; no copy of ours may delay that.
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.close(int(descriptor))
    statuses: dict[int, int] = {}
    number = signal.SIGCHLD
    while child not in statuses and number == signal.SIGCHLD:
        number = signal.Signals(signal.sigwait(_NOTICED))
        _reap(statuses)
    # When its parent dies, a rank ends by itself, and removes its folder first.
    grace_s = {signal.SIGCHLD: GRACE_S, signal.SIGHUP: orphaned_s, signal.SIGTERM: 0.0}[number]
    until_s = time.monotonic() + grace_s
    while _reap(statuses) and (left_s := until_s - time.monotonic()) > 0:
        signal.sigtimedwait(_NOTICED, left_s)
    until_s = time.monotonic() + _END_S
    while _reap(statuses) and time.monotonic() < until_s:
        _kill(psutil.Process().children(recursive=True))
        signal.sigtimedwait(_NOTICED, 0.05)
    return statuses.get(child, signal.SIGKILL)


def _reap(statuses: dict[int, int]) -> bool:
    """Note the statuses of children that have ended; whether there are others."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _end_as(status: int) -> NoReturn:
    """End this process in the way of another one, given its status as ``os.waitpid`` has it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)  # SIGKILL needs no such thing
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
