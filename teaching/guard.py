"""A guard process that kills all descendants of a process when that process exits.

A daemon starts its own session and forks twice, so it's in none of our process groups or lists of
children, and as an orphan it's reparented to init. Linux lets a process adopt such orphans
(PR_SET_CHILD_SUBREAPER, man 2 prctl), so ``enter`` creates a guard above the caller that adopts
them, and kills whatever is left below it. On other systems, ``end`` kills the process and its
group, or on Windows its descendants; a process that has left them survives.
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

GRACE_S = 0.5
"""The time that processes have to notice that their parent has ended, and to clean up."""

_SUBREAPER, _SIGNAL_ON_PARENTS_DEATH = 36, 1  # linux/prctl.h
_NOTICED = (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM) if sys.platform == "linux" else ()
# Far longer than any process needs to exit, unless a driver or a network disk holds it up.
_END_S = 5.0


def enter() -> None:
    """Continue as the child of a guard, in a new session; the guard keeps this process's id.

    The guard exits with the child's status, once everything that the child started has exited. On
    SIGTERM, and if its own parent dies, it kills these processes. Does nothing on systems other
    than Linux. The process must not have threads.
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
        _end_as(_guard(child))
    finally:
        os._exit(1)  # whatever happens, only the child continues


def end(pid: int) -> None:
    """Kill the process with that id, which has called ``enter``, and all of its descendants."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":
            os.kill(pid, signal.SIGTERM)
        elif hasattr(os, "killpg"):
            # The group may not exist yet, or may already be empty.
            os.killpg(pid, signal.SIGKILL)
        else:
            with suppress(psutil.Error):
                top = psutil.Process(pid)
                _kill([top, *top.children(recursive=True)])


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # the process has just exited, or belongs to another user
            process.kill()


def _guard(child: int) -> int:
    """Wait until the child exits or must be killed, and end its descendants; return its status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A reader notices the child's exit by its closed pipes, so the guard must not keep them open.
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.close(int(descriptor))
    statuses: dict[int, int] = {}
    number = signal.SIGCHLD
    while child not in statuses and number == signal.SIGCHLD:
        number = signal.Signals(signal.sigwait(_NOTICED))
        _reap(statuses)
    until_s = time.monotonic() + (GRACE_S if number == signal.SIGCHLD else 0.0)
    while _reap(statuses) and (left_s := until_s - time.monotonic()) > 0:
        signal.sigtimedwait(_NOTICED, left_s)
    until_s = time.monotonic() + _END_S
    while _reap(statuses) and time.monotonic() < until_s:
        _kill(psutil.Process().children(recursive=True))
        signal.sigtimedwait(_NOTICED, 0.05)
    return statuses.get(child, signal.SIGKILL)


def _reap(statuses: dict[int, int]) -> bool:
    """Store the statuses of children that have exited; return whether any others are left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _end_as(status: int) -> NoReturn:
    """Exit in the same way as another process, whose status from ``os.waitpid`` is ``status``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)  # SIGKILL doesn't need this
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
