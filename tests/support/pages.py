"""Run the Python code of a Markdown page from top to bottom; compare its output with the page's.

python tests/support/pages.py docs/vgpu.md
"""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# ```python ... ``` and, if one follows, ```text ... ```
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def run(path: Path, python: Sequence[str] = (sys.executable,), **where: Any) -> str:
    """Run a page in a separate process; return what's wrong with it, or an empty string.

    ``python`` is the command, ``where`` is passed to ``subprocess.run``: folder and environment.
    """
    command = [*python, __file__, path]
    done = subprocess.run(command, text=True, capture_output=True, **where)
    return done.stdout + done.stderr if done.returncode else ""


def _run_here(path: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    names = {"__name__": "__main__"}
    for found in BLOCK.finditer(text):
        code, expected = found[1], found[2] or ""
        line = text[: found.start()].count("\n") + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Empty lines above it, so that tracebacks have the page's line numbers.
            exec(compile("\n" * line + code, path, "exec"), names)
        if printed.getvalue() != expected:
            sys.exit(
                f"{path}, line {line}, prints\n{printed.getvalue()}and the page says\n{expected}"
            )


if __name__ == "__main__":
    _run_here(sys.argv[1])
