"""Explorer for the ledger of claims: search by words, verdict and lesson."""

from collections.abc import Sequence
from typing import Any

import ipywidgets
from IPython.display import Code, display

from helpers.course.claims import ANY, Claim, listing, search


def findings(
    ledger: Sequence[Claim], words: str = "", verdict: str = ANY, lesson: str = ANY
) -> list[Any]:
    """Return what to display for ``search``: a table and, for a single claim, its proof's code."""
    matches = search(ledger, words, verdict, lesson)
    if not matches:
        return ["No claim matches. Try fewer words."]
    if len(matches) == 1 and matches[0].proof:
        return [listing(matches), Code(matches[0].proof.source, language="python")]
    return [listing(matches)]


def show_claims(
    ledger: Sequence[Claim], words: str = "", verdict: str = ANY, lesson: str = ANY
) -> None:
    """Display ``findings``."""
    for each in findings(ledger, words, verdict, lesson):
        display(each)


def claims_explorer(ledger: Sequence[Claim]) -> ipywidgets.Widget:
    """Return a text field for words, and dropdowns for verdict and lesson, with ``findings``."""
    verdicts, lessons = ({getattr(c, name) for c in ledger} for name in ("status", "lesson"))
    words = ipywidgets.Text(description="words", placeholder="gradient sum")
    verdict = ipywidgets.Dropdown(options=[ANY, *sorted(verdicts)], description="verdict")
    lesson = ipywidgets.Dropdown(options=[ANY, *sorted(lessons)], description="lesson")
    shown = ipywidgets.Output()

    def answer(_: Any = None) -> None:
        # The output is set, not captured: nbclient sends captured output back to the kernel and can
        # then miss the reply to a quick cell (jupyter/nbclient#312).
        matches = findings(ledger, words.value, verdict.value, lesson.value)
        shown.outputs = tuple(map(_output, matches))

    for control in (words, verdict, lesson):
        control.observe(answer, "value")
    answer()
    return ipywidgets.VBox([ipywidgets.HBox([words, verdict, lesson]), shown])


def _output(value: Any) -> dict[str, Any]:
    data = {"text/plain": str(value)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_()
    return {"output_type": "display_data", "data": data, "metadata": {}}
