"""The child's side of ``launch.run``: one rank, from its start to the end of its process group."""

import atexit
import ctypes
import faulthandler
import gc
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

import vgpu
from vgpu import backend
from vgpu.launch import guard
from vgpu.launch.call_sites import count_messages, rank_state
from vgpu.launch.forkserver import SOCKETS_FOLDER
from vgpu.launch.messages import (
    Failure,
    Job,
    Joined,
    Result,
    crash_path,
    dump,
    dumps,
    function_path,
    result_path,
)
from vgpu.launch.output import redirect


def _end_forkserver(folder: str, forkserver: int) -> None:
    if os.getpid() == forkserver:  # what is forked from it inherits this function
        shutil.rmtree(folder, ignore_errors=True)
        # Taking torch down in an orderly way takes seconds, and nothing of it is needed here.
        os._exit(0)


if SOCKETS_FOLDER in os.environ:  # the forkserver imports this module last
    atexit.register(_end_forkserver, os.environ[SOCKETS_FOLDER], os.getpid())
    backend.prepare()
    # A rank never frees what it was forked with. Each of its collections of garbage would go
    # through all of torch, and by touching every object make a copy of its page. What is garbage by
    # now stays as well: a megabyte, and to find it would take a quarter of a second.
    gc.freeze()
    gc.enable()


class _Rank:
    """The state of this process as a rank; there is at most one for its whole life."""

    def __init__(self, control: Connection, scratch: Path) -> None:
        self.scratch = scratch
        self.stage = "is starting"
        self.released = threading.Event()
        self._control = control
        self._sending = threading.Lock()
        self._main_thread = threading.get_ident()

    def send(self, message: object) -> None:
        with self._sending:
            self._control.send(message)

    def receive(self) -> Any:
        """The parent's next message. If the parent is gone, this process ends."""
        try:
            message = self._control.recv_bytes()
        except (EOFError, OSError):
            self._end_with_parent()
        return pickle.loads(message)

    def serve(self) -> None:
        """Answer the parent for as long as it lives."""
        while True:
            message = self.receive()
            if message == "state":
                self.send_state()
            elif message == "release":
                self.released.set()

    def send_state(self) -> None:
        self.send(rank_state(self._main_thread, self.stage))

    def tell_before_cpp_aborts(self) -> None:
        """Tell the parent where the rank is before an exception that C++ catches nowhere ends it.

        gloo throws in a thread of its own where ranks bring unequally many bytes to a collective.
        The parent then knows the collectives of every rank, as in a hang.
        """
        cpp = ctypes.CDLL("libstdc++.so.6")
        set_terminate = cpp._ZSt13set_terminatePFvvE
        set_terminate.restype = handler_type = ctypes.CFUNCTYPE(None)
        process = os.getpid()

        def tell() -> None:
            if os.getpid() == process:  # not in a fork of the rank
                self.send_state()
            before()  # writes the exception, and ends the process

        self._tell = handler_type(tell)  # C++ keeps its address alone
        before = set_terminate(self._tell)

    def _end_with_parent(self) -> NoReturn:
        # Children of a forkserver outlive the notebook's kernel. A killed kernel cleans nothing
        # up, so the ranks remove the folder and end their own children and themselves.
        for _ in range(3):  # another rank may be writing into it
            shutil.rmtree(self.scratch, ignore_errors=True)
            if not self.scratch.exists():
                break
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


_rank: _Rank | None = None


def inside_rank() -> bool:
    """Whether ``launch.run`` started this process."""
    return _rank is not None


def main(control: Connection, output: Connection, scratch: Path) -> None:
    """Be one rank: the entry point of the process.

    ``scratch`` is a folder of this run alone, which the parent makes once its ranks are there.
    """
    global _rank
    if hasattr(os, "setsid"):
        # A group of its own: the Stop button's signal goes to the kernel's group and is the
        # parent's to handle, and what this rank starts can be ended together with it.
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.enter()
    redirect(output)
    _rank = _Rank(control, scratch)
    job: Job = _rank.receive()
    if sys.platform == "linux":
        _rank.tell_before_cpp_aborts()
    threading.Thread(target=_rank.serve, name="launch-serve", daemon=True).start()
    with crash_path(scratch, job.rank).open("w") as crash:
        faulthandler.enable(crash)
        _prepare(job)
        outcome = _outcome(_rank, job)
        faulthandler.disable()
    _flush()
    _rank.send(outcome)
    # The others may still need this rank's sockets.
    _rank.released.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    _flush()


def renew_autograd() -> None:
    """In a fork: let autograd notice that it is one, before there are threads.

    The first that saves a tensor for backward makes a new engine in place of the old one, without a
    lock (``PythonEngine::get_python_engine`` in torch/csrc/autograd/python_engine.cpp). Two of
    DataParallel's threads may do so at once, and the process crashes.
    """
    torch.ones((), requires_grad=True).sin()


def as_if_fresh() -> None:
    """In a fork: give it the autograd engine and the random numbers of a new process."""
    renew_autograd()
    np.random.seed()  # NumPy would repeat those of the parent, Python's own random does not


def _prepare(job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    linecache.cache.update(job.sources)
    torch.set_num_threads(job.threads)
    as_if_fresh()
    if job.gpus is not None:
        spec, memory_bytes = job.gpus
        vgpu.enable(job.world_size, spec, memory_bytes)
    # A DataLoader in a rank starts its workers in the usual way, not as this process was started.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    count_messages()


def _outcome(rank: _Rank, job: Job) -> Result | Failure:
    """Call the function and write its result."""
    kind = "unreadable"
    try:
        with function_path(rank.scratch).open("rb") as file:
            function, args = pickle.load(file)
        kind = "raised"
        _join_group(job, rank.scratch)
        rank.send(Joined(os.getpid()))
        rank.stage = "runs"
        value = function(job.rank, job.world_size, *args)
        rank.stage = "has returned"
        kind = "unsendable"
        with result_path(rank.scratch, job.rank).open("wb") as file:
            dump(value, file)
    except SystemExit as error:
        return _failure("exited", error)
    except BaseException as error:
        # What it had brought to a collective may explain why another rank died in it.
        rank.send_state()
        return _failure(kind, error)
    return Result()


def _join_group(job: Job, scratch: Path) -> None:
    dist.set_debug_level_from_env()  # read when torch was imported, in an earlier environment
    if job.gpus is not None or "nccl" in job.backend:
        torch.accelerator.set_device_index(job.rank)
    store = dist.FileStore(str(scratch / "store"), job.world_size)
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        # The parent's limit comes first: the parent knows more about a hang than the group does.
        timeout=timedelta(days=1),
    )
    # A function may leave the group at once, and so close connections that others still make.
    store.set(f"joined/{job.rank}", "")
    store.wait([f"joined/{rank}" for rank in range(job.world_size)])
    if job.connect_nccl:
        # NCCL connects at its first collective. One that hangs there is in no flight recorder.
        dist.all_reduce(torch.zeros(1, device="cuda"))


def _failure(kind: str, error: BaseException) -> Failure:
    stamp_ns = time.monotonic_ns()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # the launcher's own frames
    text = traceback.TracebackException(type(error), error, trace)
    try:
        content = dumps(error.with_traceback(None))
        pickle.loads(content)
    except Exception:
        # Many exceptions do not survive pickling; the text always does.
        content = None
    return Failure(
        stamp_ns,
        kind,
        summary="".join(text.format_exception_only()).strip(),
        traceback="".join(text.format()).rstrip(),
        exception=content,
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The function may have closed or replaced them; its result counts all the same.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
