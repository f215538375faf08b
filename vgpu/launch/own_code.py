"""Which lines of a stack are the learner's own: one rule, for hangs, crashes and wrong answers."""

import sysconfig
from functools import cache
from pathlib import Path

import torch

_LAUNCHER = Path(__file__).resolve().parent
_PACKAGE = _LAUNCHER.parent
# In a clone the teacher's tools stand beside it: the exam's checks, and the judge of a class.
_COURSE = (_PACKAGE, _PACKAGE.parent / "teaching")
_INSTALLED = {"site-packages", "dist-packages"}
# torch is named because a build from source is imported from where it was built.
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
    Path(torch.__file__).resolve().parent,
    _LAUNCHER,
)


# Looking at a rank asks this of thousands of frames, and the answer takes a walk through folders.
@cache
def is_library(filename: str) -> bool:
    """Whether a frame's file belongs to Python, to an installed package or to the launcher."""
    if filename.startswith("<"):
        return filename.startswith("<frozen")  # any other is code that was typed in
    path = Path(filename).resolve()
    return not _INSTALLED.isdisjoint(path.parts) or any(map(path.is_relative_to, _LIBRARIES))


@cache
def is_learners(filename: str) -> bool:
    """Whether a frame's file is the learner's: not a library's, and not this course's."""
    if is_library(filename):
        return False
    path = Path(filename).resolve()
    return filename.startswith("<") or not any(map(path.is_relative_to, _COURSE))
