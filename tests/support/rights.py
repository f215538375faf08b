"""What a sandbox may lack: tests that need it are skipped there, and say why."""

import multiprocessing

import pytest

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None

ENOUGH_HANDLES = 512
"""Ranks, torchrun's agents and browsers' servers each open a few dozen, pytest-xdist more."""


def without_file_handles() -> str:
    """Return why many processes can't be started here, or "" if they can.

    First raises the soft limit as far as allowed.
    """
    if resource is None:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_HANDLES if hard == resource.RLIM_INFINITY else min(ENOUGH_HANDLES, hard)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if 0 <= most < ENOUGH_HANDLES:
        return f"it opens more files at once than the {most} allowed here (ulimit -n)"
    return ""


def without_shared_memory() -> str:
    """Return why processes can't share memory on this machine, or "" if they can."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        return f"it needs shared memory (/dev/shm); here: {error.strerror}"
    return ""


needs_shared_memory = pytest.mark.skipif(
    bool(without_shared_memory()), reason=without_shared_memory()
)
