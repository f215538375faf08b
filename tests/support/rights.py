"""What a sandbox may lack: tests that cannot do without it are skipped there, and say why."""

import multiprocessing

import pytest


def without_shared_memory() -> str:
    """Why processes cannot share memory on this machine, or "" if they can."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        return f"it needs memory that processes share (/dev/shm); here: {error.strerror}"
    return ""


needs_shared_memory = pytest.mark.skipif(
    bool(without_shared_memory()), reason=without_shared_memory()
)
