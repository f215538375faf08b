"""Builds the wheel: the library part of ``helpers``, under a name of its own.

In the course the package is called ``helpers``, as the lessons say it. Installed into a stranger's
environment it must not be: ``helpers`` is what half the projects in the world call a folder of
their own. So the wheel carries the same files as ``multi_gpu_pytorch``, with that word in place of
the other, and without what only the course needs. An editable install of a clone is the course.
"""

import re
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COURSE, LIBRARY = "helpers", "multi_gpu_pytorch"
# They need the notebooks, or the packages of the extra "course".
LEFT_OUT = {"checks", "course", "data.py", "train", "widgets"}


class LibraryHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version, build_data):
        if self.target_name != "wheel" or version == "editable":
            return
        self.scratch = tempfile.TemporaryDirectory()
        package = Path(self.scratch.name, LIBRARY)
        write_library(Path(self.root, COURSE), package)
        build_data["force_include"][str(package)] = LIBRARY


def write_library(course, library):
    """Copy the package ``course`` to ``library``, renamed in every file."""
    for path in sorted(course.rglob("*")):
        inside = path.relative_to(course)
        if inside.parts[0] in LEFT_OUT or (path.suffix != ".py" and path.name != "py.typed"):
            continue
        text = path.read_text(encoding="utf-8")
        aim = library / inside
        aim.parent.mkdir(parents=True, exist_ok=True)
        aim.write_text(re.sub(rf"\b{COURSE}\b", LIBRARY, text), encoding="utf-8")
