"""The ledger of claims: read, search and count claims, and find the cells that prove them."""

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from vgpu.tables import Table

ANY = "any"
PENDING = "pending"
VERDICTS = ("true", "dated", "false", "predicted", "open")
"""``predicted``: shown only by the cost model.

A second cell in the lesson, tagged ``moves-<id>``, shows how the outcome changes with the model's
free parameters.
"""


@dataclass(frozen=True)
class Proof:
    """The cell that settles a claim: where it is, the heading above it, and its code."""

    notebook: str  # a file name
    cell_id: str
    heading: str
    source: str

    @property
    def address(self) -> str:
        """A link that opens the notebook in JupyterLab at this cell."""
        return f"{self.notebook}#cell-id={self.cell_id}"


@dataclass(frozen=True)
class Claim:
    """One claim in the ledger, and its verdict.

    ``holds`` is what holds instead, the answer to a question, or the limits of a true claim;
    ``believed`` is why people believe it. ``proof`` is None while the claim is pending.
    """

    id: str
    claim: str
    verdict: str
    lesson: str
    holds: str = ""
    believed: str = ""
    pending: str = ""
    proof: Proof | None = None

    @property
    def status(self) -> str:
        """One of ``VERDICTS``, or "pending" if no cell has settled the claim yet."""
        return PENDING if self.pending else self.verdict


def read(folder: Path | str = ".") -> list[Claim]:
    """Return all claims in ``folder``/claims.yml, with proofs from the notebooks in that folder.

    If a claim has multiple proofs, the first in the claim's lesson counts. Raises FileNotFoundError
    for a folder without a ledger.
    """
    path = Path(folder) / "claims.yml"
    if not path.exists():
        raise FileNotFoundError(f"no claims.yml in {path.parent.resolve()}: run this in notebooks/")
    proofs: dict[tuple[str, str], Proof] = {}
    for notebook in sorted(Path(folder).glob("*.ipynb")):
        for claim_id, proof in _proofs(notebook):
            proofs.setdefault((lesson_of(notebook), claim_id), proof)
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Claim(**entry, proof=proofs.get((entry["lesson"], entry["id"]))) for entry in entries]


def lesson_of(notebook: Path) -> str:
    """Return the notebook's value for ``Claim.lesson``.

    It's "01" for ``01_devices`` and "old code" for ``appendix_old_code``.
    """
    first, _, rest = notebook.stem.partition("_")
    return rest.replace("_", " ") if first == "appendix" else first


def search(
    claims: Iterable[Claim], words: str = "", verdict: str = ANY, lesson: str = ANY
) -> list[Claim]:
    """Return the claims with all of ``words``, this verdict, and this lesson.

    ``words`` match in any order and case, even inside longer words, in a claim's id, its sentence,
    what holds, and why it's believed. ``ANY`` disables a filter.
    """
    wanted = words.lower().split()
    return [
        claim
        for claim in claims
        if verdict in (ANY, claim.status)
        and lesson in (ANY, claim.lesson)
        and all(word in _text(claim) for word in wanted)
    ]


def counts(claims: Iterable[Claim]) -> Table:
    """Return a table of the number of claims by lesson and verdict; the last row has the totals."""
    claims = list(claims)
    statuses = [s for s in (*VERDICTS, PENDING) if search(claims, verdict=s)]
    rows: list[list[object]] = []
    for lesson in [*sorted({claim.lesson for claim in claims}), ANY]:
        by_status = Counter(claim.status for claim in search(claims, lesson=lesson))
        name = "all" if lesson == ANY else lesson
        rows.append([name, *(by_status[status] or "" for status in statuses), by_status.total()])
    return Table(("lesson", *statuses, "claims"), rows)


def listing(claims: Sequence[Claim]) -> Table:
    """Return a table of the claims, in which each id links to the cell that proves the claim."""
    rows = [(c.id, c.status, c.claim, c.holds, _place(c)) for c in claims]
    header = ("claim", "verdict", "what people say", "what holds", "proved in")
    named = "1 claim" if len(claims) == 1 else f"{len(claims)} claims"
    widths = {"what people say": "33%", "what holds": "35%", "proved in": "20%"}
    return Table(header, rows, caption=named, links=_links(claims), widths=widths)


def answers(claims: Sequence[Claim]) -> Table:
    """Return a table of claims, what holds instead, and why people believe them.

    It has the same links as ``listing``.
    """
    rows = [(c.id, c.claim, c.holds, c.believed) for c in claims]
    header = ("claim", "what people say", "what holds", "why people believe it")
    widths = dict.fromkeys(header[1:], "31%")
    return Table(header, rows, links=_links(claims), widths=widths)


@dataclass(frozen=True)
class Folded:
    """A long table that a notebook shows as one line until it's clicked."""

    table: Table
    summary: str

    def __str__(self) -> str:
        return f"{self.summary}\n{self.table}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        summary = html.escape(self.summary)
        return f"<details><summary>{summary}</summary>{self.table._repr_html_()}</details>"


def _links(claims: Sequence[Claim]) -> dict[str, str]:
    return {claim.id: claim.proof.address for claim in claims if claim.proof}


def _place(claim: Claim) -> str:
    heading = claim.proof.heading if claim.proof else claim.pending
    return f"{claim.lesson} · {heading}"


def _text(claim: Claim) -> str:
    return " ".join((claim.id, claim.claim, claim.holds, claim.believed)).lower()


def _proofs(path: Path) -> Iterator[tuple[str, Proof]]:
    """Yield claim ids and the cells that prove them, in notebook order."""
    heading = ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            bare = re.sub(r"```.*?```", "", source, flags=re.DOTALL)
            heading = (re.findall(r"^#+ (.*)$", bare, re.MULTILINE) or [heading])[-1]
        for tag in cell["metadata"].get("tags", ()):
            if tag.startswith("claim-"):
                proof = Proof(path.name, cell["id"], heading, source)
                yield tag.removeprefix("claim-"), proof
