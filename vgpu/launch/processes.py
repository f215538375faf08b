"""Starts the processes of one run, listens to them, and terminates them no matter what happens."""

import os
import shutil
import signal
import tempfile
import time
import uuid
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from vgpu.launch.hangs import STOPPED, RankState, ranks_text
from vgpu.launch.output import RankOutput
from vgpu.launch.rank import (
    Failure,
    Job,
    Joined,
    Result,
    context,
    function_path,
    main,
    main_module_hidden,
)

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

    def __init__(self, jobs: list[Job], call: bytes, output: RankOutput) -> None:
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
            # A dead process's pipe has everything that it wrote. A live one may keep writing, and
            # the others need their turn.
            ended = rank.process.sentinel in ready
            self._read_output(rank, everything=ended)
            self._read_control(rank)
            if ended:
                rank.process.join()
                rank.ended_ns, rank.exit_code = now_ns, rank.process.exitcode
        self._output_waits = self._output.show(now_ns)

    def ask_states(self, time_s: float) -> list[RankState | None]:
        """Return where each rank is; None for a rank that doesn't answer in that time.

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
        """Let ranks that have sent their results exit, and wait at most ``time_s`` for that."""
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

    def _start(self, context: Any, job: Job) -> None:
        control, control_there = context.Pipe()
        output, output_there = context.Pipe(duplex=False)
        process = context.Process(
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
