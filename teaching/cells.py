"""Run code cells as a notebook does, with display, f?, !ls, %magics and top-level await."""

import atexit
import sys
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


class _Compiler(CachingCompiler):
    """A compiler that gives code the name passed to ``Shell.run``, which tracebacks then show."""

    name = "cell"

    def get_code_name(self, *_: object) -> str:
        return f"<{self.name}>"


class Shell(InteractiveShell):
    """IPython without a terminal, history or window; a cell's names go into ``user_ns``."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        config = Config({"HistoryManager": {"enabled": False}})
        super().__init__(user_ns=namespace, config=config, compiler_class=_Compiler)
        # This handler would keep each shell's names until exit, and collect garbage once per shell.
        atexit.unregister(self.atexit_operations)

    def run(self, source: str, name: str) -> None:
        """Run one cell; raise whatever it raises, including SystemExit and KeyboardInterrupt."""
        assert isinstance(self.compile, _Compiler)
        self.compile.name = name
        self.run_cell(source, silent=True).raise_error()

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        # Skip extensions that only the learner's machine had, such as a formatter.
        if self.find_line_magic(magic_name) is None:
            return None
        try:
            return super().run_line_magic(magic_name, line, _stack_depth + 1)
        except ModuleNotFoundError:
            if magic_name == "load_ext":
                return None
            raise

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing: there's no window here."""

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str | None, str]:
        """Draw figures without showing them, whatever the cell asks for."""
        return gui, "agg"

    def ask_exit(self) -> None:
        sys.exit()

    # A cell's exceptions go to the caller; nobody reads a traceback here.
    def showtraceback(self, *_: Any, **__: Any) -> None:
        pass

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        pass
