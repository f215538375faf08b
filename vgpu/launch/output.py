"""The ranks' output, which the ranks timestamp and the parent merges chronologically.

Each rank writes to its own pipe. Reading multiple pipes loses the order in which things were
printed, so the output of ranks that print in turn, with barriers in between, would be shuffled.
Therefore, every piece of text carries the time at which it was written; all processes on a machine
share one monotonic clock.
"""

import codecs
import io
import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NamedTuple

MAX_OUTPUT_CHARACTERS = 1_000_000
"""How much each rank can print in one run; the rest is dropped to keep the notebook usable."""

_MARK = re.compile(rb"\0(\d+)([oe])\0")
_LONGEST_MARK = 32
_STREAMS = {b"o": "stdout", b"e": "stderr"}


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
