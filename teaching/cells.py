"""Runs code cells as a notebook does: display, f?, !ls, %magics, top-level await."""

import atexit
import sys
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


class _Compiler(CachingCompiler):
    """Knows code by the name that ``Shell.run`` was given, as tracebacks then show it."""

    name = "cell"

    def get_code_name(self, *_: object) -> str:
        return f"<{self.name}>"


class Shell(InteractiveShell):
    """IPython without a terminal, a history or a window; a cell's names go into ``user_ns``."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        config = Config({"HistoryManager": {"enabled": False}})
        super().__init__(user_ns=namespace, config=config, compiler_class=_Compiler)
        # It would keep each shell's names to the end, and look for garbage once for each of them.
        atexit.unregister(self.atexit_operations)

    def run(self, source: str, name: str) -> None:
        """Run one cell; raises what it raises, SystemExit and KeyboardInterrupt included."""
        assert isinstance(self.compile, _Compiler)
        self.compile.name = name
        self.run_cell(source, silent=True).raise_error()

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        # What the learner's machine had and this one has not, such as a formatter, is left out.
        if self.find_line_magic(magic_name) is None:
            return None
        try:
            return super().run_line_magic(magic_name, line, _stack_depth + 1)
        except ModuleNotFoundError:
            if magic_name == "load_ext":
                return None
            raise

    def enable_gui(self, gui: str | None = None) -> None:
        """There is no window here."""

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str | None, str]:
        """Figures are drawn and not shown, whatever the cell asks for."""
        return gui, "agg"

    def ask_exit(self) -> None:
        sys.exit()

    # What a cell raises goes to the caller; nobody reads a traceback here.
    def showtraceback(self, *_: Any, **__: Any) -> None:
        pass

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        pass
