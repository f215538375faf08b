"""What ranks print: stamped with the time on their side, merged in that order on the parent's.

Each rank writes to a pipe of its own. Reading several pipes loses the order in which things were
printed, and a lesson whose ranks print in turn, with a barrier between them, would come out
shuffled. So every piece of text carries the time at which it was written: a machine has one
monotonic clock for all its processes.
"""

import codecs
import io
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

MAX_OUTPUT_CHARACTERS = 1_000_000
"""What one rank may print in one run; the rest is counted and dropped, to keep the cell usable."""

_MARK = re.compile(rb"\0(\d+)([oe])\0")
_LONGEST_MARK = 32
_STREAMS = {b"o": "stdout", b"e": "stderr"}


class _StampedWriter(io.RawIOBase):
    """A raw stream that puts the time and the name of the stream before what it writes."""

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
    """In a rank: send all that it prints to ``output``, including what C and C++ code prints."""
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


@dataclass
class _Reader:
    """Turns the bytes of one rank back into lines."""

    rank: int
    rest: bytes = b""
    stamp_ns: int = 0
    stream: str = "stdout"
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    partial: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    taken: int = 0
    dropped: int = 0

    def pieces(self, data: bytes) -> list[tuple[int, str, str]]:
        """(stamp, stream, text) for each finished line, and for each state of a progress bar."""
        data = self.rest + data
        # The last mark may have come only in part; it waits for the next read.
        cut = data.rfind(b"\0", max(0, len(data) - _LONGEST_MARK))
        whole_mark = cut >= 0 and any(m.end() == cut + 1 for m in _MARK.finditer(data))
        if cut < 0 or whole_mark:
            cut = len(data)
        self.rest, data = data[cut:], data[:cut]
        found: list[tuple[int, str, str]] = []
        start = 0
        for mark in _MARK.finditer(data):
            self._take(data[start : mark.start()], found)
            self.stamp_ns, self.stream = int(mark[1]), _STREAMS[mark[2]]
            start = mark.end()
        self._take(data[start:], found)
        return found

    def last(self) -> list[tuple[int, str, str]]:
        """What was printed without a newline at the end."""
        found = [(self.stamp_ns, s, text + "\n") for s, text in self.partial.items() if text]
        if self.dropped:
            note = f"[...] {self.dropped:,} more characters of this rank are not shown\n"
            found.append((self.stamp_ns, "stderr", note))
        return found

    def _take(self, data: bytes, found: list[tuple[int, str, str]]) -> None:
        text = self.decoder.decode(data)
        if not text:
            return
        if self.taken + len(text) > MAX_OUTPUT_CHARACTERS:
            self.dropped += len(text)
            return
        self.taken += len(text)
        *lines, rest = (self.partial[self.stream] + text).split("\n")
        for line in lines:
            # A terminal would show only what follows the last carriage return.
            shown = line.rstrip("\r").rpartition("\r")[2]
            found.append((self.stamp_ns, self.stream, shown + "\n"))
        if "\r" in rest:
            rest = "\r" + rest.rstrip("\r").rpartition("\r")[2]
            found.append((self.stamp_ns, self.stream, rest))
        self.partial[self.stream] = rest


@dataclass
class _Event:
    """Text that a rank printed, or an action that a rank asked for, and when."""

    stamp_ns: int
    rank: int
    stream: str = ""
    text: str = ""
    action: Callable[[], object] | None = None


class Output:
    """On the parent's side: what all ranks print and report, given out in the order of time."""

    def __init__(self, world_size: int, *, by_rank: bool) -> None:
        self._readers = [_Reader(rank) for rank in range(world_size)]
        self._by_rank = by_rank
        self._events: list[_Event] = []
        self._open_bar: int | None = None

    def feed(self, rank: int, data: bytes) -> None:
        """Take bytes that came from a rank's pipe."""
        for stamp_ns, stream, text in self._readers[rank].pieces(data):
            self._events.append(_Event(stamp_ns, rank, stream, text))

    def call(self, stamp_ns: int, rank: int, action: Callable[[], object]) -> None:
        """Run an action when its turn among the printed lines comes."""
        self._events.append(_Event(stamp_ns, rank, action=action))

    def show(self, before_ns: int) -> bool:
        """Print what happened before a point in time; True if something is left for later.

        What is newer than the last look at the pipes waits for the next look: something older may
        still be on its way from another rank.
        """
        now: list[_Event] = []
        later: list[_Event] = []
        for event in self._events:
            due = event.stamp_ns < before_ns and not (self._by_rank and event.action is None)
            (now if due else later).append(event)
        self._events = later
        self._give_out(sorted(now, key=lambda event: event.stamp_ns))
        return any(event.action or not self._by_rank for event in later)

    def finish(self, *, act: bool) -> None:
        """Print all that is left, unfinished lines included; run actions only with ``act``."""
        for reader in self._readers:
            for stamp_ns, stream, text in reader.last():
                self._events.append(_Event(stamp_ns, reader.rank, stream, text))
        events = [event for event in self._events if act or event.action is None]
        self._events = []
        if self._by_rank:
            # Of a progress bar only its last state is worth a line.
            events = [event for event in events if not event.text.startswith("\r")]
            self._give_out(sorted(events, key=lambda event: (event.rank, event.stamp_ns)))
        else:
            self._give_out(sorted(events, key=lambda event: event.stamp_ns))

    def _give_out(self, events: list[_Event]) -> None:
        # Lines that follow each other go out in one write: each write is a message to the browser.
        text, stream = "", "stdout"
        for event in events:
            if text and (event.action or event.stream != stream):
                _write(text, stream)
                text = ""
            if event.action:
                event.action()
            else:
                text += self._marked(event)
                stream = event.stream
        if text:
            _write(text, stream)

    def _marked(self, event: _Event) -> str:
        """The text with its rank; a progress bar is drawn over its own last state only."""
        same_line = self._open_bar == event.rank
        before = "" if self._open_bar is None else "\r" if same_line else "\n"
        is_bar = event.text.startswith("\r")
        self._open_bar = event.rank if is_bar else None
        return f"{before}[rank {event.rank}] {event.text.removeprefix(chr(13))}"


def _write(text: str, stream: str) -> None:
    target = getattr(sys, stream)
    target.write(text)
    target.flush()
