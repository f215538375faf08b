"""Claims whose mechanism is broken on purpose, one file per lesson; the proving cell must then fail.

A cell that passes although its claim is false proves nothing. Each entry in a file's ``BROKEN``
says what's broken and how; ``tests/claims/test_broken_claims.py`` tries them.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from needed_cells import needed

from teaching import lessons
from teaching.lessons import Cell

# Pairs of (old text, new text).
Edits = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Broken:
    """A claim whose mechanism is broken in one way; the cell tagged ``claim-<id>`` must then fail.

    The text ``old`` must occur exactly once in the lesson's code up to the proving cell, and is
    replaced with ``new``; ``further`` has more such pairs. ``before`` is code that runs just before
    the proving cell, with the lesson's names; its ``patch("torch.nn.DataParallel.scatter", new)``
    replaces something in a module and is undone afterward. Ranks are separate processes, so only an
    edit reaches them. ``shorter`` has edits that break nothing and only save time, such as a
    sweep over fewer sizes: with only these, the cell must pass.
    """

    claim: str
    how: str
    old: str = ""
    new: str = ""
    further: Edits = ()
    before: str = ""
    shorter: Edits = ()
    # The proving cell's id, for a claim with several.
    cell: str = ""
    # Ids of cells that the proving cell needs without using any of their names: they modify an object.
    needs: Sequence[str] = ()
    # Takes more than a few seconds: only make test-all tries it.
    expensive: bool = False
    # Must be in "<type>: <message>" of the error that the proving cell raises.
    error: str = "AssertionError"

    @property
    def edits(self) -> Edits:
        return [(self.old, self.new), *self.further] if self.old else []


def all_broken() -> list[Broken]:
    """The entries of all files here."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    files = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [broken for file in files for broken in file.BROKEN]


def proving(broken: Broken) -> tuple[Path, str]:
    """The notebook of the cell that must fail, and the cell's id."""
    found = [
        (path, cell.id)
        for path in lessons.NOTEBOOKS
        for cell in lessons.tagged(path, f"claim-{broken.claim}")
        if broken.cell in ("", cell.id)
    ]
    assert len(found) == 1, f"{broken.claim} ({broken.how}): which of these cells? {found}"
    return found[0]


def upto(path: Path, cell_id: str) -> list[Cell]:
    """A notebook's code cells, up to and including ``cell_id``."""
    code = [cell for cell in lessons.cells(path) if cell.is_code]
    return code[: [cell.id for cell in code].index(cell_id) + 1]


def cells_to_run(path: Path, cell_id: str, broken: Broken, edits: Edits) -> list[Cell]:
    """The cells that the proving cell needs, including itself, with these edits made."""
    cells, places = upto(path, cell_id), set()
    for old, new in edits:
        found = [cell.id for cell in cells for _ in range(cell.source.count(old))]
        assert len(found) == 1, f"the text to change occurs in {found or 'no cell'}: {old!r}"
        places.update(found)
        cells = [replace(cell, source=cell.source.replace(old, new)) for cell in cells]
    cells = needed(cells, broken.needs)
    unused = places - {cell.id for cell in cells}
    assert not unused, f"{broken.claim} does not need the cells that are edited: {unused}"
    return cells
