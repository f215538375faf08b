"""Programs as a user starts them: a script or a module, in a new Python process."""

import os
import subprocess
import sys
from pathlib import Path

from teaching.lessons import ROOT


def command(program, *arguments):
    """Return the command that runs a module, passed by name, or a script, passed by path."""
    program = ["-m", program] if isinstance(program, str) else [program]
    return [sys.executable, *program, *map(str, arguments)]


def environment(**names):
    """Return this process's environment with the repository's packages and these variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **names}


def run(program, *arguments, cwd=None, **names):
    """Run a program to completion; ``names`` are environment variables. Its output is text."""
    return subprocess.run(
        command(program, *arguments), cwd=cwd, env=environment(**names), text=True,
        capture_output=True,
    )  # fmt: skip


def start(program, *arguments, output: Path, cwd=None, **names):
    """Start a program; its output is appended to a file."""
    with open(output, "ab") as file:
        return subprocess.Popen(
            command(program, *arguments), cwd=cwd, env=environment(**names),
            stdout=file, stderr=file,
        )  # fmt: skip
