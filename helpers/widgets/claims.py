"""The ledger of claims to search and filter, by words, verdict and lesson."""

from collections.abc import Sequence

import ipywidgets
from IPython.display import Code, display

from helpers.claims import ANY, Claim, listing, search


def show_claims(
    ledger: Sequence[Claim], words: str = "", verdict: str = ANY, lesson: str = ANY
) -> None:
    """List what ``search`` finds; where it is a single claim, the code of its proof as well."""
    found = search(ledger, words, verdict, lesson)
    display(listing(found) if found else "No claim has all of this. Fewer words find more.")
    if len(found) == 1 and found[0].proof:
        display(Code(found[0].proof.source, language="python"))


def claims_explorer(ledger: Sequence[Claim]) -> ipywidgets.Widget:
    """A line for words and a menu each for verdict and lesson, around ``show_claims``."""
    verdicts, lessons = ({getattr(c, name) for c in ledger} for name in ("status", "lesson"))
    words = ipywidgets.Text(description="words", placeholder="gradient sum", continuous_update=True)
    verdict = ipywidgets.Dropdown(options=[ANY, *sorted(verdicts)], description="verdict")
    lesson = ipywidgets.Dropdown(options=[ANY, *sorted(lessons)], description="lesson")
    shown = ipywidgets.interactive_output(
        lambda words, verdict, lesson: show_claims(ledger, words, verdict, lesson),
        {"words": words, "verdict": verdict, "lesson": lesson},
    )
    return ipywidgets.VBox([ipywidgets.HBox([words, verdict, lesson]), shown])
