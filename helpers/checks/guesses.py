"""Predictions: ``guess("4a", ...)`` takes yours down, and ``.compare(outcome)`` shows both.

One small file a guess, beside the solved exercises, so that lesson 00 can count them.
"""

import html
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from IPython.display import display

from helpers.checks.records import GUESS_SUFFIX, folder

_ID = re.compile(r"\d+[a-z]")


class Guess:
    """One prediction of the learner's; ``guess`` makes it."""

    def __init__(self, guess_id: str, value: Any) -> None:
        self.id = guess_id
        self.value = value

    @property
    def made(self) -> bool:
        """Whether there is one: the ``...`` was replaced."""
        return self.value is not ...

    def compare(self, outcome: Any, *, within: float = 0.0, unit: str = "") -> None:
        """Show the guess beside what came out, and remember whether they agree.

        within: how far a number may be off, as a share of the outcome; 0.25 is a quarter. Lists and
        tuples are compared number by number. unit: written behind both, as in "ms".
        """
        comparison = Comparison(self.id, self.value, outcome, within, unit)
        if self.made:
            comparison.remember()
        display(comparison)

    def __repr__(self) -> str:
        if self.made:
            return f"Guess {self.id}: {self.value!r}. Run on, and see."
        return f"Guess {self.id}: none yet. Put yours in place of the three dots, then run on."


class Comparison:
    """A guess and an outcome side by side."""

    def __init__(self, guess_id: str, value: Any, outcome: Any, within: float, unit: str) -> None:
        self.id = guess_id
        self.agrees = value is not ... and agree(value, outcome, within)
        self.yours = "no guess" if value is ... else _text(value, unit)
        self.outcome = _text(outcome, unit)
        self._attempted = value is not ...

    @property
    def verdict(self) -> str:
        if not self._attempted:
            return "not guessed"
        return "as you said" if self.agrees else "not as you said"

    def remember(self) -> None:
        """Keep it for lesson 00; a folder that cannot be written is told by ``check``."""
        record = {"guess": self.yours, "outcome": self.outcome, "right": self.agrees}
        try:
            folder().mkdir(parents=True, exist_ok=True)
            path = folder() / f"{self.id}{GUESS_SUFFIX}"
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"The guess could not be noted in {folder()} ({error.strerror}).")

    def __repr__(self) -> str:
        return (
            f"Guess {self.id}: {self.verdict}\n  yours    {self.yours}\n  outcome  {self.outcome}"
        )

    def _repr_html_(self) -> str:
        colour = "#009E73" if self.agrees else "#E69F00" if self._attempted else "#999999"
        rows = "".join(
            f"<tr><td style='text-align:left'>{name}</td><td style='text-align:left'>"
            f"<code style='white-space:pre-wrap'>{html.escape(text)}</code></td></tr>"
            for name, text in (("yours", self.yours), ("outcome", self.outcome))
        )
        return (
            f"<div style='border-left:6px solid {colour};padding:4px 12px'>"
            f"<b>Guess {html.escape(self.id)}: {self.verdict}</b><table>{rows}</table></div>"
        )


def guess(guess_id: str, value: Any = ..., *, one_of: Sequence[Any] = ()) -> Guess:
    """Take down a prediction; ``...`` means that there is none yet, and the lesson runs on.

    guess_id: the lesson and a letter, as "4a". one_of: the answers to choose from. Raises
    ValueError for another answer, or an id of another form.
    """
    if not _ID.fullmatch(guess_id):
        raise ValueError(f"a guess's id is a lesson and a letter, as in '4a'; found {guess_id!r}")
    if one_of and value is not ... and value not in one_of:
        choices = ", ".join(map(repr, one_of))
        raise ValueError(f"guess {guess_id}: choose one of {choices}; found {value!r}")
    return Guess(guess_id, value)


def counts() -> dict[str, tuple[int, int]]:
    """By lesson, as "04": how many guesses were made, and how many of them were right."""
    by_lesson: dict[str, tuple[int, int]] = {}
    for path in folder().glob(f"*{GUESS_SUFFIX}"):
        lesson = f"{int(path.name.removesuffix(GUESS_SUFFIX)[:-1]):02d}"
        right = json.loads(path.read_text(encoding="utf-8"))["right"]
        made, hits = by_lesson.get(lesson, (0, 0))
        by_lesson[lesson] = made + 1, hits + bool(right)
    return by_lesson


def agree(value: Any, outcome: Any, within: float = 0.0) -> bool:
    """Whether a guess agrees with an outcome; numbers to the share ``within``."""
    if isinstance(outcome, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(outcome):
            return False
        return all(agree(a, b, within) for a, b in zip(value, outcome, strict=True))
    if isinstance(outcome, bool) or isinstance(value, bool):
        return value is outcome
    if isinstance(outcome, int | float) and isinstance(value, int | float):
        return math.isclose(value, outcome, rel_tol=0.0, abs_tol=within * abs(outcome))
    if isinstance(outcome, str) and isinstance(value, str):
        return value.strip().casefold() == outcome.strip().casefold()
    return bool(value == outcome)


def _text(value: Any, unit: str) -> str:
    return f"{_number(value)} {unit}".strip()


def _number(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_number, value)) or "an empty list"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
