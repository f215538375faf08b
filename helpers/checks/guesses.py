"""Predictions: ``guess("4a")`` asks for one; ``.compare(outcome)`` shows it next to the outcome.

In JupyterLab, the learner guesses with a button or a text field, or skips the guess. Then the
explanation, folded in ``<details class="why-4a">``, opens. Nothing waits for a guess: all cells in
a lesson can be run at once, and without a front end, only the outcome is shown.

Each guess is recorded in a small file, next to those for solved exercises, so that lesson 00 can
count them.
"""

import html
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import ipywidgets
from IPython.display import display

from helpers.checks.records import GUESS_SUFFIX, folder

_ID = re.compile(r"\d+[a-z]")
_NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")


class Guess:
    """One of the learner's predictions; created by ``guess``."""

    def __init__(self, guess_id: str, one_of: Sequence[Any], numbers: int) -> None:
        self.id = guess_id
        self.one_of = one_of
        self.numbers = numbers
        self.value: Any = None
        self.skipped = False
        self._comparison: Comparison | None = None
        self._shown: ipywidgets.Output | None = None

    def answer(self, value: Any) -> None:
        """Set the guess: one of the choices, or numbers, which can be text (``"8,0"``).

        Raises ValueError for an unknown choice, or for too many or too few numbers.
        """
        self.value = self._choice(value) if self.one_of else self._numbers(value)
        self._show()

    def skip(self) -> None:
        """Continue without a guess."""
        self.skipped = True
        self._show()

    def compare(self, outcome: Any, *, within: float = 0.0, unit: str = "") -> None:
        """Show the guess next to the outcome, and record whether they agree.

        ``within`` is the relative tolerance for a number; 0.25 is a quarter of the outcome.
        ``unit``, such as "ms", is appended to both. Until the guess is made or skipped, a sentence
        asks for it instead. Raises ValueError if the outcome has more or fewer numbers than the
        guess.
        """
        if not self.one_of and len(_flat(outcome)) != self.numbers:
            raise ValueError(
                f"guess {self.id} asks for numbers={self.numbers}, but the outcome has "
                f"{len(_flat(outcome))}: write guess({self.id!r}, numbers={len(_flat(outcome))})"
            )
        self._comparison = Comparison(self.id, outcome, within, unit)
        if _in_jupyter():
            self._shown = ipywidgets.Output()
            self._show()
            display(self._shown)
        else:
            self._comparison.meet(self.value)
            display(self._comparison)

    def controls(self) -> ipywidgets.Widget:
        """Return a button for each choice, or a field for numbers, and a "skip" button."""
        skip = ipywidgets.Button(description="skip", layout={"width": "auto"})
        message = ipywidgets.HTML()
        if self.one_of:
            makers = [
                ipywidgets.Button(description=str(choice), layout={"width": "auto"})
                for choice in self.one_of
            ]
        else:
            such_as = ", ".join(["3"] * self.numbers)
            asked = "a number" if self.numbers == 1 else f"{self.numbers} numbers, as in {such_as}"
            # Sent when Enter is pressed or the field loses focus, not on every keystroke.
            makers = [ipywidgets.Text(placeholder=asked, continuous_update=False)]

        def take(value: Any) -> None:
            try:
                self.skip() if value is skip else self.answer(value)
            except ValueError as error:
                message.value = html.escape(str(error))
                return
            taken = "skipped" if self.skipped else f"<b>{html.escape(_text(self.value))}</b>"
            message.value = f"Guess {self.id}: {taken}. Run the next cell."
            for control in (*makers, skip):
                control.disabled = True

        skip.on_click(take)
        if self.one_of:
            for button, choice in zip(makers, self.one_of, strict=True):
                button.on_click(lambda _, choice=choice: take(choice))
        else:
            makers[0].observe(lambda change: take(change["new"]), "value")
        return ipywidgets.VBox([ipywidgets.HBox([*makers, skip]), message])

    def __repr__(self) -> str:
        return f"Guess {self.id}: {'none yet' if self.value is None else _text(self.value)}"

    def _show(self) -> None:
        if self._shown is None or self._comparison is None:
            return
        bundles = [{"text/plain": f"Make guess {self.id} above, or skip it, to see the outcome."}]
        if self.value is not None or self.skipped:
            self._comparison.meet(self.value)
            # The kernel can't change a Markdown cell, so JavaScript opens the explanation.
            opening = (
                f'document.querySelectorAll("details.why-{self.id}")'
                ".forEach(explanation => { explanation.open = true; });"
            )
            bundles = [
                {"text/plain": repr(self._comparison), "text/html": self._comparison._repr_html_()},
                {"application/javascript": opening},
            ]
        self._shown.outputs = tuple(
            {"output_type": "display_data", "data": data, "metadata": {}} for data in bundles
        )

    def _choice(self, value: Any) -> Any:
        for choice in self.one_of:
            if _same_words(choice, value):
                return choice
        choices = ", ".join(map(str, self.one_of))
        raise ValueError(f"guess {self.id}: choose one of {choices}; got {value}")

    def _numbers(self, value: Any) -> list[float]:
        texts = _NUMBER.findall(str(value))
        if len(texts) != self.numbers:
            raise ValueError(
                f"guess {self.id} asks for {self.numbers} number{'s' * (self.numbers > 1)}; "
                f"got {len(texts)} in {str(value)!r}"
            )
        return [float(text) for text in texts]


class Comparison:
    """A guess and an outcome side by side."""

    def __init__(self, guess_id: str, outcome: Any, within: float, unit: str) -> None:
        self.id = guess_id
        self.outcome = outcome
        self.within = within
        self.unit = unit
        self.value: Any = None

    def meet(self, value: Any) -> None:
        """Set the guess, and, unless it's None, record it and the outcome for lesson 00."""
        self.value = value
        if value is None:
            return
        record = {"guess": self.yours, "outcome": self._came_out, "right": self.agrees}
        # If the folder can't be written to, say so, as ``check`` does.
        try:
            folder().mkdir(parents=True, exist_ok=True)
            path = folder() / f"{self.id}{GUESS_SUFFIX}"
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"The guess could not be saved in {folder()} ({error.strerror}).")

    @property
    def agrees(self) -> bool:
        return self.value is not None and agree(self.value, self.outcome, self.within)

    @property
    def yours(self) -> str:
        return "no guess" if self.value is None else _text(self.value, self.unit)

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not guessed"
        return "as you predicted" if self.agrees else "not as you predicted"

    @property
    def _came_out(self) -> str:
        return _text(self.outcome, self.unit)

    def __repr__(self) -> str:
        return (
            f"Guess {self.id}: {self.verdict}\n  yours    {self.yours}\n  outcome  {self._came_out}"
        )

    def _repr_html_(self) -> str:
        color = "#999999" if self.value is None else "#009E73" if self.agrees else "#E69F00"
        rows = "".join(
            f"<tr><td style='text-align:left'>{name}</td><td style='text-align:left'>"
            f"<code style='white-space:pre-wrap'>{html.escape(text)}</code></td></tr>"
            for name, text in (("yours", self.yours), ("outcome", self._came_out))
        )
        return (
            f"<div style='border-left:6px solid {color};padding:4px 12px'>"
            f"<b>Guess {html.escape(self.id)}: {self.verdict}</b><table>{rows}</table></div>"
        )


def guess(
    guess_id: str, value: Any = None, *, one_of: Sequence[Any] = (), numbers: int = 1
) -> Guess:
    """Ask for a prediction; if the front end has no widgets, pass it as ``value``.

    ``guess_id`` is the lesson and a letter, as in "4a". ``one_of`` has the answers to choose from;
    without it, the guess consists of ``numbers`` numbers. Raises ValueError for an invalid id, and
    whenever ``Guess.answer`` does.
    """
    if not _ID.fullmatch(guess_id):
        raise ValueError(f"a guess's id is a lesson and a letter, as in '4a'; got {guess_id!r}")
    asked = Guess(guess_id, one_of, numbers)
    if value is not None:
        asked.answer(value)
    elif _in_jupyter():
        display(asked.controls())
    return asked


def counts() -> dict[str, tuple[int, int]]:
    """Return how many guesses were made, and how many were right, by lesson ("04" and so on)."""
    by_lesson: dict[str, tuple[int, int]] = {}
    for path in folder().glob(f"*{GUESS_SUFFIX}"):
        lesson = f"{int(path.name.removesuffix(GUESS_SUFFIX)[:-1]):02d}"
        right = json.loads(path.read_text(encoding="utf-8"))["right"]
        made, hits = by_lesson.get(lesson, (0, 0))
        by_lesson[lesson] = made + 1, hits + bool(right)
    return by_lesson


def agree(value: Any, outcome: Any, within: float = 0.0) -> bool:
    """Return whether a guess agrees with an outcome, ignoring case.

    ``within`` is a relative tolerance.
    """
    mine, came_out = _flat(value), _flat(outcome)
    return len(mine) == len(came_out) and all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=within * abs(b))
        if isinstance(a, int | float) and isinstance(b, int | float)
        else _same_words(a, b)
        for a, b in zip(mine, came_out, strict=True)
    )


def _in_jupyter() -> bool:
    """Return whether there's anyone who can answer.

    Jupyter's server sets this variable; nbclient and nbmake don't.
    """
    return "JPY_SESSION_NAME" in os.environ


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [number for part in value for number in _flat(part)]
    return [value]


def _same_words(one: Any, other: Any) -> bool:
    return str(one).strip(" \"'").casefold() == str(other).strip(" \"'").casefold()


def _text(value: Any, unit: str = "") -> str:
    parts = (f"{part:.3g}" if isinstance(part, float) else str(part) for part in _flat(value))
    return f"{', '.join(parts)} {unit}".strip() or "nothing"
