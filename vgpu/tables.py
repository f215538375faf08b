"""A small table that renders itself in a notebook and reads well as text."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

_STYLE = "text-align:left;vertical-align:top"


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; cells are converted to text, True and False to yes and no.

    In a notebook, text in `backticks` is shown as code. ``links`` maps a cell's text to the address
    that it links to in a notebook, and ``widths`` maps a column to its CSS width; other columns are
    as wide as necessary. Raises ValueError for a row that doesn't have as many cells as the header.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    links: dict[str, str] | None = None
    widths: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"a row has {len(row)} cells, but the header has {len(self.header)}: {row}"
                )

    def _texts(self) -> list[list[str]]:
        spoken = {True: "yes", False: "no"}
        return [
            [spoken[cell] if isinstance(cell, bool) else str(cell) for cell in row]
            for row in self.rows
        ]

    def __str__(self) -> str:
        lines = [[str(name) for name in self.header], *self._texts()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        shown = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.caption, *shown] if self.caption else shown)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        style = f"style='{_STYLE}'"
        head = "".join(f"{self._column(str(name))}</th>" for name in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td {style}>{self._cell(text)}</td>" for text in row) + "</tr>"
            for row in self._texts()
        )
        # Put the caption above the table, where it's read first.
        caption = f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _column(self, name: str) -> str:
        width = (self.widths or {}).get(name)
        return f"<th style='{_STYLE}{f';width:{width}' if width else ''}'>{html.escape(name)}"

    def _cell(self, text: str) -> str:
        address = (self.links or {}).get(text)
        code = r"<code style='white-space:normal;overflow-wrap:anywhere'>\1</code>"
        shown = re.sub(r"`([^`]+)`", code, html.escape(text))
        return f"<a href='{html.escape(address, quote=True)}'>{shown}</a>" if address else shown
