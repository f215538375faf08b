"""Work for later, when a reader has stopped running cells and reads."""

import asyncio
from collections.abc import Callable

from IPython.core.getipython import get_ipython

QUIET_S = 2.0


def when_idle(function: Callable[[], object], quiet_s: float = QUIET_S) -> None:
    """Call ``function`` once no cell has run for so many seconds; only where a kernel runs cells.

    It is called between cells, in the kernel's own thread.
    """
    shell = get_ipython()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if shell is None:
        return

    def look(count: int | None) -> None:
        if shell.execution_count == count:
            function()
        else:
            loop.call_later(quiet_s, look, shell.execution_count)

    look(None)
