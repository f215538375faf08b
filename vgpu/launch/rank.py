"""The child's side of ``launch.run``: what a rank receives, does, and sends back."""

import ctypes
import faulthandler
import importlib
import io
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from inspect import getclosurevars, isfunction
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, NoReturn

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

import vgpu
from vgpu.launch.hangs import count_messages, rank_state

# What the parent and its ranks send each other


@dataclass
class Job:
    """Everything that a rank needs in order to start."""

    rank: int
    world_size: int
    backend: str
    threads: int
    gpus: tuple[vgpu.GPUSpec, int] | None
    """The model and memory size of each rank's virtual GPU; None if ranks have none."""
    connect_nccl: bool
    """Whether NCCL connects the ranks' GPUs before the function begins."""
    environment: dict[str, str]
    sources: dict[str, Any]
    """The parent's linecache entries for code that isn't in a file: the notebook's cells."""


@dataclass
class Joined:
    """The rank has joined its process group; the function starts."""


@dataclass
class Result:
    """The function has returned; its value is in the file ``result_path``."""


@dataclass
class Failure:
    """Why a rank has no result."""

    stamp_ns: int
    kind: str
    """"raised", "exited" (SystemExit), "unsendable" (its result) or "unreadable" (the function)."""
    summary: str
    """The last line of a traceback: type and message."""
    traceback: str
    exception: bytes | None
    """The pickled exception, if it can be pickled."""


def function_path(scratch: Path) -> Path:
    """Return the file to which the parent pickles (function, arguments)."""
    return scratch / "function.pkl"


def result_path(scratch: Path, rank: int) -> Path:
    """Return the file to which a rank pickles what the function returned.

    For large tensors, a file is about three times as fast as the pipe, and needs only one copy.
    """
    return scratch / f"result-{rank}.pkl"


def crash_path(scratch: Path, rank: int) -> Path:
    """Return the file to which faulthandler writes when the process crashes."""
    return scratch / f"crash-{rank}.txt"


# What a rank does


class _Rank:
    """The state of this process as a rank; there is at most one in a process's lifetime."""

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
        """Return the parent's next message. If the parent is gone, this process exits."""
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
        """Tell the parent where the rank is before an uncaught C++ exception kills it.

        gloo throws one in its own thread if ranks pass different numbers of bytes to a collective.
        The parent then knows every rank's collectives, as it does after a hang.
        """
        cpp = ctypes.CDLL("libstdc++.so.6")
        set_terminate = cpp["_ZSt13set_terminatePFvvE"]
        set_terminate.restype = handler_type = ctypes.CFUNCTYPE(None)
        process = os.getpid()

        def tell() -> None:
            if os.getpid() == process:  # not in a process forked from the rank
                self.send_state()
            before()  # the previous handler prints the exception and kills the process

        self._tell = handler_type(tell)  # kept alive here, since C++ has only its address
        before = set_terminate(self._tell)

    def _end_with_parent(self) -> NoReturn:
        # A forkserver's children outlive the notebook's kernel. A killed kernel doesn't clean up,
        # so the ranks remove the folder, kill their own children, and exit.
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
    """Run a rank; this is the entry point of its process.

    ``scratch`` is this run's own folder, which the parent creates once its ranks have started.
    """
    global _rank
    if hasattr(os, "setsid"):
        # The rank gets its own process group: the Stop button's signal then reaches only the
        # kernel's group, where the parent handles it, and whatever the rank starts can be killed
        # along with it.
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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


def as_if_fresh() -> None:
    """In a forked process, set up the autograd engine and random numbers as in a new process.

    The first operation that saves a tensor for backward replaces the engine, without a lock
    (``PythonEngine::get_python_engine`` in torch/csrc/autograd/python_engine.cpp). If two of
    DataParallel's threads do so at once, the process crashes; so it's done here.
    """
    torch.ones((), requires_grad=True).sin()
    np.random.seed()  # NumPy would repeat the parent's numbers; Python's own random doesn't


def _prepare(job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    linecache.cache.update(job.sources)
    torch.set_num_threads(job.threads)
    as_if_fresh()
    if job.gpus is not None:
        spec, memory_bytes = job.gpus
        vgpu.enable(job.world_size, spec, memory_bytes)
    # A rank's DataLoader starts its workers in the usual way, not as this process was started.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    count_messages()


def _outcome(rank: _Rank, job: Job) -> Result | Failure:
    """Call the function, write its result, and return the outcome."""
    kind = "unreadable"
    try:
        with function_path(rank.scratch).open("rb") as file:
            function, args = pickle.load(file)
        kind = "raised"
        _join_group(job, rank.scratch)
        rank.send(Joined())
        rank.stage = "runs"
        value = function(job.rank, job.world_size, *args)
        rank.stage = "has returned"
        kind = "unsendable"
        with result_path(rank.scratch, job.rank).open("wb") as file:
            dump(value, file)
    except SystemExit as error:
        return _failure("exited", error)
    except BaseException as error:
        # What this rank passed to a collective may explain why another rank died in it.
        rank.send_state()
        return _failure(kind, error)
    return Result()


def _join_group(job: Job, scratch: Path) -> None:
    dist.set_debug_level_from_env()  # torch read it on import, from an earlier environment
    if job.gpus is not None or "nccl" in job.backend:
        torch.accelerator.set_device_index(job.rank)
    store = dist.FileStore(str(scratch / "store"), job.world_size)
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        # Let the parent's timeout expire first: the parent knows more about a hang than the group
        # does.
        timeout=timedelta(days=1),
    )
    # A function might leave the group immediately, closing connections that others are opening.
    store.set(f"joined/{job.rank}", "")
    store.wait([f"joined/{rank}" for rank in range(job.world_size)])
    if job.connect_nccl:
        # NCCL connects in its first collective. A hang there isn't in any flight recorder.
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
        # Many exceptions can't be pickled; their text always can.
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
        # The function may have closed or replaced them; its result still counts.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


# Output, which a rank timestamps so that the parent can merge all ranks' output chronologically


class _StampedWriter(io.RawIOBase):
    """A raw stream that prefixes everything with the time and the stream's name."""

    def __init__(self, send: Callable[[bytes], None], stream: bytes) -> None:
        self._send = send
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self._stream == b"o" else 2

    def write(self, data: Any) -> int:
        text = bytes(data)
        mark = b"\0%d%s\0" % (time.monotonic_ns(), self._stream)
        self._send(mark + text.replace(b"\0", b"\\x00"))
        return len(text)


def redirect(output: Connection) -> None:
    """In a rank, redirect stdout and stderr to ``output``, including those of C and C++ code."""
    if os.name == "nt":
        send: Callable[[bytes], None] = output.send_bytes
    else:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        output.close()
        send = _write_all
    for name, stream in (("stdout", b"o"), ("stderr", b"e")):
        raw: Any = _StampedWriter(send, stream)
        text = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, text)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


# How values are pickled


def _code_in_its_file(make: Callable[..., CodeType], parts: tuple[Any, ...], name: str) -> CodeType:
    return make(*parts).replace(co_filename=name)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            # Since 3.1.3, cloudpickle drops the file name, which tracebacks and reports show.
            make, parts = self.dispatch_table[CodeType](obj)
            return _code_in_its_file, (make, parts, obj.co_filename)
        own_class = isinstance(obj, ModuleType) and type(obj) is not ModuleType
        if own_class and sys.modules.get(name := obj.__name__) is obj:
            # For example, cloudpickle would send torch.ops as an instance of its class.
            return importlib.import_module, (name,)
        device = obj
        if isinstance(obj, torch.Tensor) or type(obj).__module__.startswith("vgpu."):
            device = getattr(obj, "device", None)
        if isinstance(device, torch.device) and device.type == "vgpu":
            kind = "tensor" if isinstance(obj, torch.Tensor) else type(obj).__name__
            what = f"the device {device}" if obj is device else f"a {kind} on {device}"
            raise TypeError(
                f"{what} cannot leave its process: each process has its own virtual GPUs, "
                "or none. Send CPU tensors (tensor.cpu(), module.cpu()), and move them to a device "
                "in the receiving process"
            )
        return super().reducer_override(obj)


def dump(value: Any, file: IO[bytes]) -> None:
    """Write a value with cloudpickle; whatever is defined in a cell is pickled by value.

    Raises any exception from pickling, and TypeError for anything on a virtual GPU.
    """
    _Pickler(file).dump(value)


def dumps(value: Any) -> bytes:
    """Return what ``dump`` writes."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()


def dumps_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return (function, args) as ``dump`` writes it, or raise a TypeError naming the culprit."""
    try:
        return dumps((function, args))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"launch.run cannot send {name} to other processes{_culprit(function, args)}: {error}. "
            "Create it inside the function, on each rank."
        ) from error


def _culprit(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    parts = {f"argument {i} after the number of ranks": arg for i, arg in enumerate(args, start=1)}
    if isfunction(function):
        names = getclosurevars(function)
        for name, value in {**names.globals, **names.nonlocals}.items():
            parts[f"the variable {name!r} that it uses"] = value
    for where, value in parts.items():
        try:
            dumps(value)
        except Exception:
            return f", because of {where} ({type(value).__name__})"
    return ""
