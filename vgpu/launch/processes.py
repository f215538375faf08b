"""The ranks' processes: the forkserver that starts them, the processes of one run, their output.

Ranks are forked from a process that imports torch once, for all of them. The parent listens to the
ranks of a run, prints what they print, and terminates them no matter what happens.
"""

import atexit
import codecs
import gc
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import psutil

from vgpu import backend
from vgpu.launch.hangs import STOPPED, RankState, ranks_text
from vgpu.launch.rank import Failure, Job, Joined, Result, function_path, main

# The process that ranks are forked from

PRELOAD = (
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "torch.distributed.checkpoint",
    "IPython",  # cells that ranks unpickle often use it
    "vgpu.launch.processes",
)
"""The modules that the forkserver imports once, for all ranks, if they're installed."""

SOCKETS_FOLDER = "LAUNCH_SOCKETS_FOLDER"
"""The environment variable that names the folder that a forkserver removes when it exits."""

# A socket's path can have 103 bytes on macOS, 107 on Linux, including the 32 bytes of
# "/pymp-xxxxxxxx/listener-xxxxxxxx".
_LONGEST_TMPDIR_BYTES = 103 - 32
_main_lock = threading.Lock()


def start_forkserver() -> None:
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
        # A parent that's killed doesn't remove the folder that holds multiprocessing's sockets. The
        # forkserver exits a moment later, and removes the folder that this variable names.
        os.environ[SOCKETS_FOLDER] = _sockets_folder()
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ[SOCKETS_FOLDER]


def _spawn(path: str, arguments: list[str], passed: list[int]) -> int:
    """Start the forkserver or multiprocessing's resource tracker, in a process group of its own.

    When a notebook's kernel shuts down, it sends SIGTERM to its process group and waits until the
    group is empty. The tracker ignores SIGTERM, and a dead forkserver stays a zombie of the kernel,
    so each shutdown would take 2.5 s. Both exit on their own when their parent does.
    """
    # Importing creates millions of objects, none of them garbage; garbage collection would take a
    # fifth of the import time. vgpu.launch.processes, the last import, turns the collector back on.
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


def _end_forkserver(folder: str, forkserver: int) -> None:
    if os.getpid() == forkserver:  # processes forked from it inherit this function
        shutil.rmtree(folder, ignore_errors=True)
        # An orderly shutdown of torch takes seconds, and nothing here needs it.
        os._exit(0)


if SOCKETS_FOLDER in os.environ:  # the forkserver imports this module last
    atexit.register(_end_forkserver, os.environ[SOCKETS_FOLDER], os.getpid())
    backend.prepare()
    # A rank never frees the objects that it was forked with. Each of its garbage collections would
    # go through all of torch, and touching an object copies its page. Existing garbage stays, too:
    # a megabyte, which would take a quarter of a second to find.
    gc.freeze()
    gc.enable()


# The processes of one run

_PIPE_BYTES = 1 << 16


@dataclass
class RankProcess:
    """One rank, as its parent sees it."""

    rank: int
    process: Any
    control: Connection
    output: Connection
    joined: Joined | None = None
    outcome: Result | Failure | None = None
    state: RankState | None = None
    ended_ns: int | None = None
    """When its process was found to have exited."""
    exit_code: int | None = None
    """The exit code, as in multiprocessing: negative if a signal killed the process."""

    @property
    def died(self) -> bool:
        return self.ended_ns is not None and self.outcome is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the rank's process."""
        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:  # the process has exited in the meantime
            return False

    def send(self, message: object) -> None:
        # A dead rank receives nothing; its sentinel reports the death.
        with suppress(OSError):
            self.control.send(message)


class RankProcesses:
    """A context manager for the ranks of one run and their folder; on exit, both are gone."""

    def __init__(self, jobs: list[Job], call: bytes, output: "RankOutput") -> None:
        self.ranks: list[RankProcess] = []
        # The ranks know this name before the folder exists, and delete it if this process is
        # killed.
        self.scratch = Path(tempfile.gettempdir(), f"launch-{os.getpid()}-{uuid.uuid4().hex}")
        self._jobs = jobs
        self._call = call
        self._output = output
        self._output_waits = False

    def __enter__(self) -> "RankProcesses":
        try:
            started_from = context()
            for job in self._jobs:
                self._start(started_from, job)
            self.scratch.mkdir(mode=0o700)
            function_path(self.scratch).write_bytes(self._call)
            for rank, job in zip(self.ranks, self._jobs, strict=True):
                rank.send(job)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._output.finish()

    def listen(self, until_s: float) -> None:
        """Read what ranks send until ``time.monotonic()`` reaches ``until_s``."""
        alive = [rank for rank in self.ranks if rank.ended_ns is None]
        pipes = [p for rank in alive for p in (rank.control, rank.output) if not p.closed]
        sentinels = [rank.process.sentinel for rank in alive]
        timeout_s = 0 if self._output_waits else max(0.0, until_s - time.monotonic())
        ready = wait([*pipes, *sentinels], timeout_s)
        now_ns = time.monotonic_ns()
        for rank in alive:
            # A dead process's pipe has everything that it wrote. A live process may keep writing,
            # and the other pipes need their turn.
            ended = rank.process.sentinel in ready
            self._read_output(rank, everything=ended)
            self._read_control(rank)
            if ended:
                rank.process.join()
                rank.ended_ns, rank.exit_code = now_ns, rank.process.exitcode
        self._output_waits = self._output.show(now_ns)

    def ask_states(self, time_s: float) -> list[RankState | None]:
        """Return where each rank is; None for a rank that doesn't answer within ``time_s``.

        For a rank that has failed or exited, it's the last state that it sent.
        """
        before = {}
        for rank in self.ranks:
            if rank.ended_ns is None and not isinstance(rank.outcome, Failure):
                before[rank.rank] = rank.state
                rank.state = RankState(STOPPED) if rank.is_stopped else None
                rank.send("state")
        until_s = time.monotonic() + time_s
        while time.monotonic() < until_s:
            if all(rank.state or rank.ended_ns is not None for rank in self.ranks):
                break
            self.listen(until_s)
        for rank in self.ranks:
            if rank.ended_ns is not None and rank.state is None:
                rank.state = before.get(rank.rank)
        return [rank.state for rank in self.ranks]

    def release(self, time_s: float) -> None:
        """Let ranks that have sent their results exit, and wait at most ``time_s`` for them."""
        for rank in self.ranks:
            rank.send("release")
        until_s = time.monotonic() + time_s
        while alive := [rank.rank for rank in self.ranks if rank.ended_ns is None]:
            if time.monotonic() >= until_s:
                warnings.warn(
                    f"{time_s:g} s after every rank's function had returned, {ranks_text(alive)} "
                    "had not exited: something else, such as a thread, was still running and was "
                    "stopped.",
                    stacklevel=3,
                )
                break
            self.listen(until_s)

    def _start(self, started_from: Any, job: Job) -> None:
        control, control_there = started_from.Pipe()
        output, output_there = started_from.Pipe(duplex=False)
        process = started_from.Process(
            target=main,
            args=(control_there, output_there, self.scratch),
            name=f"rank {job.rank}",
        )
        try:
            with main_module_hidden():
                process.start()
        except BaseException:
            control.close()
            output.close()
            raise
        finally:
            # Once only the rank holds its ends of the pipes, a closed pipe means that it's gone.
            control_there.close()
            output_there.close()
        self.ranks.append(RankProcess(job.rank, process, control, output))

    def _read_output(self, rank: RankProcess, *, everything: bool) -> None:
        while not rank.output.closed and rank.output.poll():
            try:
                if os.name == "nt":
                    data = rank.output.recv_bytes()
                else:
                    data = os.read(rank.output.fileno(), _PIPE_BYTES)
            except (EOFError, OSError):
                data = b""
            if data:
                self._output.feed(rank.rank, data)
            else:
                rank.output.close()
            if not everything:
                break

    def _read_control(self, rank: RankProcess) -> None:
        while not rank.control.closed and rank.control.poll():
            try:
                message = rank.control.recv()
            except (EOFError, OSError):
                rank.control.close()
                break
            if isinstance(message, RankState):
                rank.state = message
            elif isinstance(message, Joined):
                rank.joined = message
            else:
                rank.outcome = message

    def _end(self) -> None:
        for rank in self.ranks:
            _kill_descendants(rank.process.pid)
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            if rank.ended_ns is None:
                self._read_output(rank, everything=True)
            rank.process.close()
            rank.control.close()
            rank.output.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _kill_descendants(pid: int) -> None:
    """Kill everything in a rank's process group; on Windows, all of its descendants."""
    with suppress(OSError, psutil.Error):  # the group is gone, or doesn't exist yet
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:
            for process in psutil.Process(pid).children(recursive=True):
                process.kill()


# The ranks' output, merged chronologically
#
# Each rank writes to its own pipe. Reading multiple pipes loses the order in which things were
# printed, so the output of ranks that print in turn, with barriers in between, would be shuffled.
# Therefore, every piece of text carries the time at which it was written; all processes on a
# machine share one monotonic clock.

MAX_OUTPUT_CHARACTERS = 1_000_000
"""How much each rank can print in one run; the rest is dropped to keep the notebook usable."""

_MARK = re.compile(rb"\0(\d+)([oe])\0")
_LONGEST_MARK = 32
_STREAMS = {b"o": "stdout", b"e": "stderr"}


class _Text(NamedTuple):
    """A complete line, or one state of a progress bar, which starts with a carriage return."""

    stamp_ns: int
    rank: int
    stream: str
    text: str


@dataclass
class _Reader:
    """Splits the bytes from one rank into lines."""

    rank: int
    rest: bytes = b""
    stamp_ns: int = 0
    stream: str = "stdout"
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    partial: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    shown_characters: int = 0
    dropped_characters: int = 0

    def read(self, data: bytes) -> list[_Text]:
        """Return the lines that these bytes complete."""
        data = self.rest + data
        # The last mark may be incomplete; keep it for the next read.
        cut = data.rfind(b"\0", max(0, len(data) - _LONGEST_MARK))
        whole_mark = cut >= 0 and any(m.end() == cut + 1 for m in _MARK.finditer(data))
        if cut < 0 or whole_mark:
            cut = len(data)
        self.rest, data = data[cut:], data[:cut]
        texts: list[_Text] = []
        start = 0
        for mark in _MARK.finditer(data):
            texts += self._split(data[start : mark.start()])
            self.stamp_ns, self.stream = int(mark[1]), _STREAMS[mark[2]]
            start = mark.end()
        return texts + self._split(data[start:])

    def finish(self) -> list[_Text]:
        """Return the incomplete lines at the end."""
        rests = [self._text(rest + "\n", stream) for stream, rest in self.partial.items() if rest]
        if self.dropped_characters:
            dropped = self.dropped_characters
            note = f"[...] {dropped:,} more characters from this rank are not shown\n"
            rests.append(self._text(note, "stderr"))
        return rests

    def _split(self, data: bytes) -> list[_Text]:
        text = self.decoder.decode(data)
        if not text:
            return []
        if self.shown_characters + len(text) > MAX_OUTPUT_CHARACTERS:
            self.dropped_characters += len(text)
            return []
        self.shown_characters += len(text)
        *lines, rest = (self.partial[self.stream] + text).split("\n")
        # A terminal shows only what follows the last carriage return.
        texts = [self._text(line.rstrip("\r").rpartition("\r")[2] + "\n") for line in lines]
        if "\r" in rest:
            rest = "\r" + rest.rstrip("\r").rpartition("\r")[2]
            texts.append(self._text(rest))
        self.partial[self.stream] = rest
        return texts

    def _text(self, text: str, stream: str = "") -> _Text:
        return _Text(self.stamp_ns, self.rank, stream or self.stream, text)


class RankOutput:
    """In the parent, prints the output of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._readers = [_Reader(rank) for rank in range(world_size)]
        self._texts: list[_Text] = []
        self._open_bar: int | None = None

    def feed(self, rank: int, data: bytes) -> None:
        """Decode bytes from a rank's pipe."""
        self._texts += self._readers[rank].read(data)

    def show(self, before_ns: int) -> bool:
        """Print everything older than ``before_ns``; return whether anything is left for later.

        Text that's newer than the last read of the pipes has to wait: another rank may have written
        something older in the meantime.
        """
        due = [text for text in self._texts if text.stamp_ns < before_ns]
        self._texts = [text for text in self._texts if text.stamp_ns >= before_ns]
        self._write(sorted(due, key=attrgetter("stamp_ns")))
        return bool(self._texts)

    def finish(self) -> None:
        """Print everything that's left, including incomplete lines."""
        for reader in self._readers:
            self._texts += reader.finish()
        self._write(sorted(self._texts, key=attrgetter("stamp_ns")))
        self._texts = []

    def _write(self, texts: list[_Text]) -> None:
        # Write consecutive lines at once: each write is a message to the browser.
        for stream, group in itertools.groupby(texts, attrgetter("stream")):
            target = getattr(sys, stream)
            target.write("".join(map(self._prefixed, group)))
            target.flush()

    def _prefixed(self, text: _Text) -> str:
        """Prefix the text with its rank; a progress bar overwrites only its own last state."""
        same_line = self._open_bar == text.rank
        before = "" if self._open_bar is None else "\r" if same_line else "\n"
        is_bar = text.text.startswith("\r")
        self._open_bar = text.rank if is_bar else None
        return f"{before}[rank {text.rank}] {text.text.removeprefix(chr(13))}"
