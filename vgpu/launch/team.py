"""The processes of one run: started, listened to, and ended whatever happens."""

import os
import pickle
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from vgpu.launch import guard
from vgpu.launch.call_sites import Snapshot
from vgpu.launch.forkserver import context, main_module_hidden
from vgpu.launch.output import Output
from vgpu.launch.rank import (
    Failure,
    Job,
    Joined,
    Report,
    Result,
    function_path,
    main,
)

END_LIMIT_S = 10.0
"""How long a rank, and all that it has started, may take to end."""

_PIPE_BYTES = 1 << 16


@dataclass
class Member:
    """One rank as its parent knows it."""

    rank: int
    process: Any
    control: Connection
    output: Connection
    joined: bool = False
    outcome: Result | Failure | None = None
    snapshot: Snapshot | None = None
    ended_ns: int | None = None
    """When its process was seen to have ended."""
    exit_code: int | None = None
    """As in multiprocessing: the negative number of the signal if one ended the process."""

    @property
    def died(self) -> bool:
        return self.ended_ns is not None and self.outcome is None


class Team:
    """The ranks of one run and their folder, as a context: when it is left, both are gone."""

    def __init__(
        self,
        jobs: list[Job],
        payload: bytes,
        output: Output,
        on_report: Callable[[int, Any], object] | None,
    ) -> None:
        self.members: list[Member] = []
        # The ranks know its name before it exists, and delete it when this process is killed.
        self.scratch = Path(tempfile.gettempdir(), f"launch-{os.getpid()}-{uuid.uuid4().hex}")
        self._jobs = jobs
        self._payload = payload
        self._output = output
        self._on_report = on_report
        self._hurry = False

    def __enter__(self) -> "Team":
        try:
            started_from = context()
            for job in self._jobs:
                self._start(started_from, job)
            self.scratch.mkdir(mode=0o700)
            function_path(self.scratch).write_bytes(self._payload)
            for member, job in zip(self.members, self._jobs, strict=True):
                self._send(member, job)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end()
        self._output.finish(act=error is None)

    def listen(self, until_s: float) -> None:
        """Wait for news of any rank until that point of ``time.monotonic()``, and take them in."""
        alive = [m for m in self.members if m.ended_ns is None]
        sources = [s for m in alive for s in (m.control, m.output) if not s.closed]
        sentinels = [m.process.sentinel for m in alive]
        timeout_s = 0 if self._hurry else max(0.0, until_s - time.monotonic())
        ready = wait([*sources, *sentinels], timeout_s)
        now_ns = time.monotonic_ns()
        for member in alive:
            # What an ended process has written is all in its pipe. A living one may go on writing,
            # and the others need their turn.
            ended = member.process.sentinel in ready
            self._read_output(member, everything=ended)
            self._read_control(member)
            if ended:
                member.process.join()
                member.ended_ns, member.exit_code = now_ns, member.process.exitcode
        self._hurry = self._output.show(now_ns)

    def ask_where(self, time_s: float) -> list[Snapshot | None]:
        """Where each rank is; None for one that does not answer in that time."""
        for member in self.members:
            member.snapshot = None
            self._send(member, "where")
        until_s = time.monotonic() + time_s
        while time.monotonic() < until_s:
            if all(m.snapshot or m.ended_ns is not None for m in self.members):
                break
            self.listen(until_s)
        return [m.snapshot for m in self.members]

    def release(self, time_s: float) -> None:
        """Let ranks that have handed in their results go, and wait for them that long."""
        for member in self.members:
            self._send(member, "release")
        until_s = time.monotonic() + time_s
        while time.monotonic() < until_s and any(m.ended_ns is None for m in self.members):
            self.listen(until_s)

    def _start(self, context: Any, job: Job) -> None:
        control, control_there = context.Pipe()
        output, output_there = context.Pipe(duplex=False)
        process = context.Process(
            target=main,
            args=(control_there, output_there, self.scratch, os.getpid()),
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
            # Once only the rank holds its ends, the end of a pipe is the end of the rank.
            control_there.close()
            output_there.close()
        self.members.append(Member(job.rank, process, control, output))

    def _send(self, member: Member, message: object) -> None:
        # A dead rank receives nothing; its sentinel reports the death.
        with suppress(OSError):
            member.control.send(message)

    def _read_output(self, member: Member, *, everything: bool) -> None:
        while not member.output.closed and member.output.poll():
            try:
                if os.name == "nt":
                    data = member.output.recv_bytes()
                else:
                    data = os.read(member.output.fileno(), _PIPE_BYTES)
            except (EOFError, OSError):
                data = b""
            if data:
                self._output.feed(member.rank, data)
            else:
                member.output.close()
            if not everything:
                break

    def _read_control(self, member: Member) -> None:
        while not member.control.closed and member.control.poll():
            try:
                message = member.control.recv()
            except (EOFError, OSError):
                member.control.close()
                break
            if isinstance(message, Report):
                if self._on_report is not None:
                    call = partial(self._hand_on, member.rank, message.content)
                    self._output.call(message.stamp_ns, member.rank, call)
            elif isinstance(message, Snapshot):
                member.snapshot = message
            elif isinstance(message, Joined):
                member.joined = True
            else:
                member.outcome = message

    def _hand_on(self, rank: int, content: bytes) -> None:
        assert self._on_report is not None
        self._on_report(rank, pickle.loads(content))

    def _end(self) -> None:
        for member in self.members:
            # The guard of a rank that has ended is gone, too, and its id may be another's by now.
            if member.ended_ns is None or sys.platform != "linux":
                guard.end(member.process.pid)
        for member in self.members:
            member.process.join(END_LIMIT_S)
            member.process.kill()
            member.process.join()
            if member.ended_ns is None:
                self._read_output(member, everything=True)
            member.process.close()
            member.control.close()
            member.output.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
