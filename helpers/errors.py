"""Require expected errors and warnings, catch them, and show them in shortened form."""

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Caught:
    """A block's error or warning; ``error`` is None until the block has finished."""

    error: BaseException | None = None

    @property
    def message(self) -> str:
        return str(self.error)


@contextmanager
def expected_error(
    kind: type[BaseException] | tuple[type[BaseException], ...], *phrases: str, lines: int = 6
) -> Iterator[Caught]:
    """Run a block that must raise ``kind``; print at most ``lines`` lines of its message.

    Every phrase must be in the message. Raises AssertionError if the block raises nothing, or if
    the message lacks a phrase; an error of another kind isn't caught.
    """
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
        # The traceback would keep every tensor of the failed block alive.
        error.__traceback__ = None
    if caught.error is None:
        raise AssertionError(f"expected {_names(kind)}, but the block raised nothing")
    _require(phrases, caught.message, type(caught.error).__name__)
    print(_short(f"{type(caught.error).__name__}: {caught.message}", lines))


@contextmanager
def expected_warning(kind: type[Warning], *phrases: str, lines: int = 6) -> Iterator[Caught]:
    """Run a block that must warn with ``kind``; print the first such warning, shortened.

    Other warnings are shown as usual. Raises AssertionError if there was no warning of ``kind``
    whose message contains every phrase.
    """
    caught = Caught()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield caught
    for item in seen:
        fits = issubclass(item.category, kind) and all(p in str(item.message) for p in phrases)
        if not fits:
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
        elif caught.error is None and isinstance(item.message, Warning):
            caught.error = item.message
    if caught.error is None:
        others = [f"{w.category.__name__}: {w.message}" for w in seen] or ["no warning"]
        wanted = "".join(f" with {phrase!r}" for phrase in phrases)
        raise AssertionError(f"expected {kind.__name__}{wanted}, got: " + "; ".join(others))
    print(_short(f"{type(caught.error).__name__}: {caught.message}", lines))


def _require(phrases: tuple[str, ...], message: str, name: str) -> None:
    for phrase in phrases:
        if phrase not in message:
            raise AssertionError(f"the message of {name} lacks {phrase!r}; it says: {message}")


def _names(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(k.__name__ for k in kinds)


def _short(text: str, lines: int) -> str:
    wrapped = [
        part
        for line in text.strip().splitlines()
        for part in (textwrap.wrap(line, 96, break_long_words=False) or [""])
    ]
    if len(wrapped) > lines:
        wrapped = [*wrapped[:lines], "[...]"]
    return "\n".join(wrapped)
