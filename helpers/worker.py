"""The child's side of ``launch.run``: one rank, from its start to the end of its process group."""

import faulthandler
import linecache
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from helpers import rank_output, rank_places


@dataclass
class Job:
    """All that a rank is told when it starts."""

    rank: int
    world_size: int
    backend: str
    threads: int
    payload: bytes
    """cloudpickle of (function, arguments)."""
    environment: dict[str, str]
    sources: dict[str, Any]
    """The parent's linecache entries of code that stands in no file: the notebook's cells."""
    scratch: Path
    """A folder of this run alone; the parent deletes it, or the last rank that outlives it."""


@dataclass
class Joined:
    """The rank has its process group; the function begins."""


@dataclass
class Report:
    """Something that a rank handed to ``report``, as cloudpickle bytes."""

    stamp_ns: int
    content: bytes


@dataclass
class Result:
    """What the function returned, as cloudpickle bytes."""

    content: bytes


@dataclass
class Failure:
    """Why a rank has no result."""

    stamp_ns: int
    kind: str
    """"raised", "exited" (SystemExit), "unpicklable" (its result), or "unreadable" (the job)."""
    summary: str
    """The last line of a traceback: type and message."""
    traceback: str
    exception: bytes | None
    """The exception pickled, where that is possible."""


class _Rank:
    """The state of this process as a rank; there is at most one for its whole life."""

    def __init__(self, control: Connection, job: Job) -> None:
        self.control = control
        self.job = job
        self.stage = "is starting"
        self.released = threading.Event()
        self._sending = threading.Lock()
        self._main_thread = threading.get_ident()

    def send(self, message: object) -> None:
        with self._sending:
            self.control.send(message)

    def watch(self) -> None:
        """Answer the parent for as long as it lives, and go when it is gone."""
        while True:
            try:
                order = self.control.recv()
            except (EOFError, OSError):
                self._follow_parent()
            if order == "where":
                self.send(rank_places.look(self._main_thread, self.stage))
            elif order == "release":
                self.released.set()

    def _follow_parent(self) -> None:
        # Children of a forkserver outlive the notebook's kernel. A killed kernel cleans nothing
        # up, so the ranks take the folder, their own children and themselves along.
        for _ in range(3):
            shutil.rmtree(self.job.scratch, ignore_errors=True)
            if not self.job.scratch.exists():
                break
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


_rank: _Rank | None = None


def current_rank() -> int | None:
    """The rank of this process, or None where ``launch.run`` did not start it."""
    return None if _rank is None else _rank.job.rank


def report(content: Any) -> None:
    """Hand something to the ``on_report`` of the ``launch.run`` that started this rank.

    Outside such a rank it does nothing, so that the same function also runs by itself. Raises
    whatever pickling ``content`` raises.
    """
    if _rank is not None:
        _rank.send(Report(time.monotonic_ns(), cloudpickle.dumps(content)))


def main(control: Connection, output: Connection) -> None:
    """Be one rank: the entry point of the process."""
    global _rank
    if hasattr(os, "setsid"):
        # A group of its own: the Stop button's signal goes to the kernel's group and is the
        # parent's to handle, and what this rank starts can be ended together with it.
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank_output.redirect(output)
    job: Job = control.recv()
    _rank = _Rank(control, job)
    threading.Thread(target=_rank.watch, name="launch-watch", daemon=True).start()
    with open(job.scratch / f"crash-{job.rank}.txt", "w") as crash:
        faulthandler.enable(crash)
        try:
            _prepare(job)
            outcome = _attempt(_rank)
        finally:
            faulthandler.disable()
    _flush()
    _rank.send(outcome)
    # The others may still need this rank's sockets.
    _rank.released.wait()
    if isinstance(outcome, Result) and dist.is_initialized():
        dist.destroy_process_group()
    _flush()


def _prepare(job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    linecache.cache.update(job.sources)
    torch.set_num_threads(job.threads)
    # A forked process repeats the random numbers of its forkserver; a fresh one would not.
    random.seed()
    np.random.seed()


def _attempt(rank: _Rank) -> Result | Failure:
    job = rank.job
    kind = "unreadable"
    try:
        function, args = pickle.loads(job.payload)
        kind = "raised"
        _join_group(job)
        rank.send(Joined())
        rank.stage = "runs"
        value = function(job.rank, job.world_size, *args)
        rank.stage = "has returned"
        kind = "unpicklable"
        return Result(cloudpickle.dumps(value))
    except SystemExit as error:
        return _failure("exited", error)
    except BaseException as error:
        return _failure(kind, error)


def _join_group(job: Job) -> None:
    if "nccl" in job.backend:
        torch.cuda.set_device(job.rank)
    dist.init_process_group(
        job.backend,
        init_method=(job.scratch / "store").as_uri(),
        rank=job.rank,
        world_size=job.world_size,
        # The parent's own limit comes first: it knows more about a hang than this one.
        timeout=timedelta(days=1),
    )


def _failure(kind: str, error: BaseException) -> Failure:
    stamp_ns = time.monotonic_ns()
    _leave_out_own_frames(error)
    told = traceback.TracebackException.from_exception(error)
    try:
        content = cloudpickle.dumps(error.with_traceback(None))
        pickle.loads(content)
    except Exception:
        # Many exceptions do not survive pickling; the text always does.
        content = None
    return Failure(
        stamp_ns,
        kind,
        summary="".join(told.format_exception_only()).strip(),
        traceback="".join(told.format()).rstrip(),
        exception=content,
    )


def _leave_out_own_frames(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
