"""The typical mistakes in each exercise, one file per lesson."""

import importlib
from collections.abc import Callable


def template(text: str, **right: str) -> Callable[..., str]:
    """A function that fills in ``text``, with the right parts except for those that it's given."""
    return lambda **changes: text.format(**{**right, **changes})


def wrong_answers(exercise_id):
    """The typical mistakes for an exercise: pairs of code and a phrase of the hint it must get.

    Phrases with a rank or a random number are compiled patterns.
    """
    lesson = int(exercise_id.split(".")[0])
    return importlib.import_module(f"wrong_answers.lesson_{lesson:02d}").WRONG[exercise_id]
