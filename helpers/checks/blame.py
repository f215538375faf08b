"""Explain an error raised by an answer: its message, the learner's line, and a hint."""

import linecache
import re
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

from helpers.checks.describing import describe
from vgpu.launch.hangs import is_library

_ARGUMENTS = "Keep the stub's name and arguments: the check calls it with them."
_OF_NONE = (
    "Something there is None: a function without a return returns None, and so does list.append."
)
_OF_HOOK = (
    "A hook's return value matters: a gradient's hook returns None or the new gradient, and a "
    "post-accumulate hook returns None. A lambda returns its value, so write a def."
)
# Patterns in errors, each with advice; the first match counts.
_HINTS = (
    (r"^NameError", "Compare the spelling with the definition; then run the cells above again."),
    (r"^RecursionError", "A recursive function needs a case in which it doesn't call itself."),
    (r"positional argument|unexpected keyword|multiple values for argument", _ARGUMENTS),
    (r"hook returned '|hooks should return None", _OF_HOOK),
    (
        r"must return a torch.futures.Future",
        "DDP's communication hook must return a future: dist.all_reduce(tensor, async_op=True)"
        ".get_future().then(…), whose function returns the bucket's averaged tensor.",
    ),
    (r"NoneType", _OF_NONE),
    (
        r"same device|should be the same",
        "Print .device of each operand in that line, and find out where the odd one comes from.",
    ),
    (
        r"shapes? cannot|size mismatch|must match|number of elements|size of tensor|sizes? of tensors",
        "Print the shape of each operand in that line.",
    ),
)
_TRY_IT = (
    "Call it with such an input in a cell of your own, where you can print intermediate values."
)

_PACKAGE = Path(__file__).resolve().parents[1]
# In a clone, the teacher's tools are next to this package: the exam's checks and the class check.
_COURSE = (_PACKAGE, _PACKAGE.parent / "teaching")


@cache
def is_learners(filename: str) -> bool:
    """Return whether a frame's file belongs to the learner, not to a library or this course."""
    if is_library(filename):
        return False
    path = Path(filename).resolve()
    return filename.startswith("<") or not any(map(path.is_relative_to, _COURSE))


def said(error: BaseException) -> str:
    """Return the error's type and message, without tracebacks that libraries put in messages."""
    return in_short(f"{type(error).__name__}: {error}")


def in_short(message: str) -> str:
    """Return the first lines of an error's message; if it has a traceback, only the last error."""
    message = message.strip()
    if "Traceback (most recent call last)" in message:
        errors = re.findall(r"^(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$", message, re.MULTILINE)
        message = errors[-1] if errors else message.splitlines()[-1]
    text = "\n".join(message.partition("\n\n")[0].splitlines()[:3])
    return text if len(text) <= 400 else text[:394] + " [...]"


def own_line(error: BaseException) -> str:
    """Return the innermost line of the learner's own code; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if is_learners(frame.filename)]
    if not own:
        return own_line_in(str(error))
    frame = own[-1]
    line = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"in line {frame.lineno} of your cell: {line}"


def own_line_in(message: str) -> str:
    """Return what ``own_line`` does, but for a traceback in a message."""
    frames = re.findall(r'^\s*(?:File ")?(.+?)"?, line (\d+), in .*\n\s*(.*)$', message, re.M)
    own = [frame for frame in frames if is_learners(frame[0])]
    return f"in line {own[-1][1]} of your cell: {own[-1][2]}" if own else ""


def call_of(error: BaseException) -> str:
    """Return the call of the learner's function, with its arguments at the time of the error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if is_learners(frame.f_code.co_filename) and name != "<module>":
            return f"{_called(frame)} when it failed"
    return ""


def hint_for(error: BaseException, of_check: str = "") -> str:
    """Return a hint for an error; ``of_check`` is the check's own hint for any error."""
    text, own = said(error), own_line(error)
    if not own and hint_in(text) == _OF_NONE:  # the learner's code doesn't show what is None
        return f"{_OF_NONE} {of_check}".rstrip()
    if of_check:
        return of_check
    if not own and not isinstance(error, TypeError):
        return f"A library raised this while using what your answer returned. {_TRY_IT}"
    return hint_in(text) or _TRY_IT


def hint_in(message: str) -> str:
    """Return a hint for an error's message; "" for an unknown error."""
    return next((hint for phrase, hint in _HINTS if re.search(phrase, message)), "")


def _called(frame: FrameType) -> str:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    function = "your function" if code.co_name == "<lambda>" else code.co_name
    if "self" in values:
        function = f"{type(values.pop('self')).__name__}.{function}"
    shown = (f"{name}={describe(value, limit=120)}" for name, value in values.items())
    return f"{function}({', '.join(shown)})"
