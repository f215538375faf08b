"""Claims with their mechanism broken, one file a lesson: the cell that proves them must fail.

A cell that passes while what it claims is false is no proof. Each entry of a file's ``BROKEN`` says
what is broken and how; ``tests/claims/test_broken_claims.py`` tries them.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A claim whose mechanism is broken in one way; the cell tagged ``claim-<id>`` must then fail.

    ``edits`` are pairs of text: the old one stands exactly once in the lesson's code up to the
    proving cell, and the new one takes its place. ``before`` is code that runs right before the
    proving cell, with the lesson's names; its ``patch("torch.nn.DataParallel.scatter", new)``
    replaces something of a module and is undone afterwards. Ranks are processes of their own,
    which only an edit reaches.
    """

    claim: str
    how: str
    edits: Sequence[tuple[str, str]] = ()
    before: str = ""
    # The proving cell's id, for a claim that has several.
    cell: str = ""
    # Ids of cells that it needs although it uses no name of theirs: they change an object.
    needs: Sequence[str] = ()
    # Stands in "<kind>: <message>" of the error that the proving cell must raise.
    error: str = "AssertionError"


def all_broken() -> list[Broken]:
    """The entries of every file here."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    files = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [broken for file in files for broken in file.BROKEN]
