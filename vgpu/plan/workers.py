"""Calls that know nothing of each other, such as predictions, in as many processes as do good.

They are forked from the process that also serves ``launch.run``, which has imported torch: so it works
from a notebook, and from a script without an ``if __name__ == "__main__"``.
"""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from tqdm.auto import tqdm

from vgpu.launch import launcher
from vgpu.launch.forkserver import context, main_module_hidden

WORKER_BYTES = 2**30
"""Free memory for each. To predict 80 layers takes a tenth of it, or half where torch is not shared."""

SHOW_AFTER_S = 2.0
"""From here on a bar shows how far a prediction is."""

_LOOK_S = 0.5  # Windows lets nobody interrupt a wait

Tasks = Sequence[tuple[Any, ...]]
Each = Callable[[Callable[..., Any], Tasks], Iterator[tuple[int, Any]]]


def progress(what: str, unit: str, total: int | None = None, items: Any = None) -> Any:
    """A bar, shown if it takes long; of several processes that predict, their parent has one.

    total: of its updates, or items to go through.
    """
    child = multiprocessing.parent_process() is not None
    options = {"unit": unit, "leave": False, "delay": SHOW_AFTER_S, "disable": child}
    return tqdm(items, what, total, **options)


def at_once() -> int:
    """How many processes this machine's cores and free memory are enough for; at least 1."""
    free_bytes = psutil.virtual_memory().available
    return max(1, min(launcher.cores(), free_bytes // WORKER_BYTES))


@contextmanager
def workers(processes: int) -> Iterator[Each]:
    """Yields ``each(function, tasks)``: ``function(*task)`` of every task, with the task's index.

    Results come in the order in which they are ready, and an error as in a plain call. One process
    is this one; others end with the block, at once where an error or Ctrl+C ends it, and
    with this process. What travels is pickled. RuntimeError where a process dies.
    """
    if processes == 1:
        yield _here
        return
    starts = context()
    # Nobody writes into it: that it is closed, or its only writer gone, is the message.
    reader, writer = starts.Pipe(duplex=False)
    with reader, writer, ProcessPoolExecutor(processes, starts, _begin, (reader,)) as pool:
        try:
            yield functools.partial(_there, pool)
        except BaseException:
            writer.close()
            raise


def _here(function: Callable[..., Any], tasks: Tasks) -> Iterator[tuple[int, Any]]:
    for index, task in enumerate(tasks):
        yield index, function(*task)


def _there(
    pool: ProcessPoolExecutor, function: Callable[..., Any], tasks: Tasks
) -> Iterator[tuple[int, Any]]:
    with main_module_hidden():
        index_of = {pool.submit(function, *task): i for i, task in enumerate(tasks)}
    waiting: set[Future[Any]] = set(index_of)
    try:
        while waiting:
            done, waiting = wait(waiting, _LOOK_S, FIRST_COMPLETED)
            for future in done:
                yield index_of[future], future.result()
    except BrokenProcessPool as error:
        free = psutil.virtual_memory().available / 2**30
        raise RuntimeError(
            "a process that was to predict plans has died, perhaps for lack of memory "
            f"({free:.1f} GiB are free now): with processes=1 this process predicts them alone"
        ) from error


def _begin(reader: Connection) -> None:
    """In a new process: compute with one thread, and end with whoever can write into ``reader``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the parent
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(reader,), daemon=True).start()


def _end_with(reader: Connection) -> None:
    with suppress(EOFError, OSError):
        reader.recv_bytes()
    os._exit(1)
