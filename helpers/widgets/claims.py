"""Explorer for the ledger of claims: search by words, verdict and lesson."""

from collections.abc import Sequence
from functools import partial

import ipywidgets
from IPython.display import Code, display

from helpers.course.claims import ANY, Claim, listing, search
from helpers.widgets.live import explorer


def show_claims(
    ledger: Sequence[Claim], words: str = "", verdict: str = ANY, lesson: str = ANY
) -> None:
    """Display a table of what ``search`` finds and, for a single claim, its proof's code."""
    matches = search(ledger, words, verdict, lesson)
    if not matches:
        print("No claim matches. Try fewer words.")
        return
    display(listing(matches))
    if len(matches) == 1 and matches[0].proof:
        display(Code(matches[0].proof.source, language="python"))


def claims_explorer(ledger: Sequence[Claim]) -> ipywidgets.Widget:
    """Return a text field, dropdowns for verdict and lesson, and ``show_claims``'s output."""
    verdicts, lessons = ({getattr(c, name) for c in ledger} for name in ("status", "lesson"))
    controls = {
        "words": ipywidgets.Text(description="words", placeholder="gradient sum"),
        "verdict": ipywidgets.Dropdown(options=[ANY, *sorted(verdicts)], description="verdict"),
        "lesson": ipywidgets.Dropdown(options=[ANY, *sorted(lessons)], description="lesson"),
    }
    return explorer(partial(show_claims, ledger), controls)
