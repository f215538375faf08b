"""An explorer's answers for a page without a kernel: its outputs for a few values of each control.

``ask`` runs in the lesson's kernel, right after the explorer's cell.
"""

import json
import math
import time
from itertools import product
from typing import Any

import ipywidgets
from IPython.display import display

from helpers.widgets.live import Controls, Few, Function, explorers, outputs

# The most values that a page without a kernel offers per control by default, and the most
# combinations in total.
FEW_VALUES, MOST_ANSWERS = 5, 120
ANSWERS = "application/vnd.course.answers+json"
"""The media type of what ``ask`` displays."""


def ask() -> None:
    """Display the ``answers`` of explorers created since the last call, by output id.

    An explorer with a text field is left out: its values can't be listed.
    """
    every = {
        name: answers(function, controls, few)
        for name, (function, controls, few) in explorers.items()
        if not any(isinstance(control, ipywidgets.Text) for control in controls.values())
    }
    explorers.clear()
    if every:
        display({ANSWERS: every, "text/plain": f"answers of {len(every)} explorers"}, raw=True)


def answers(function: Function, controls: Controls, few: Few) -> dict[str, Any]:
    """Return what ``function`` shows for every combination of ``offered`` values, ready for JSON.

    In the result, ``controls`` has each control's label, its values as text, and the index of the
    current one. ``answers`` has the combinations in the order of itertools.product, each as indices
    into ``parts``, the distinct outputs in a notebook's format. Raises RuntimeError if the function
    fails, and ValueError whenever ``offered`` does.
    """
    values = offered(controls, few)
    begun = time.perf_counter()
    parts: dict[str, int] = {}
    combinations = []
    for choice in product(*values.values()):
        setting = {name: value for name, (_, value) in zip(values, choice, strict=True)}
        shown = outputs(function, setting)
        if failed := [each for each in shown if each["output_type"] == "error"]:
            raise RuntimeError(f"explorer at {setting}: " + "".join(failed[0]["traceback"]))
        texts = [json.dumps(each, sort_keys=True) for each in shown]
        combinations.append([parts.setdefault(text, len(parts)) for text in texts])
    described = [
        {
            "label": control.description,
            "values": [words for words, _ in values[name]],
            "now": [value for _, value in values[name]].index(control.value),
            "slider": "Slider" in type(control).__name__,
        }
        for name, control in controls.items()
    ]
    return {
        "controls": described,
        "parts": [json.loads(text) for text in parts],
        "answers": combinations,
        "seconds": time.perf_counter() - begun,
    }


def offered(controls: Controls, few: Few) -> dict[str, list[tuple[str, Any]]]:
    """Return each control's values for a page without a kernel, as (text, value) pairs.

    These are the values in ``few``; for other controls, at most FEW_VALUES, including the first,
    the last and the current one. Raises ValueError if ``few`` has a value that a control doesn't
    have, if it lacks the current value, or if there are more than MOST_ANSWERS combinations.
    """
    values_of = {}
    for name, control in controls.items():
        every = _choices(control)
        values = [value for _, value in every]
        kept = list(few.get(name, _spread(values, values.index(control.value))))
        if lacking := [value for value in kept if value not in values]:
            raise ValueError(f"control {name!r} has no {lacking}; it has {values}")
        if control.value not in kept:
            raise ValueError(
                f"control {name!r} is set to {control.value!r}, which isn't among {kept}"
            )
        values_of[name] = [(words, value) for words, value in every if value in kept]
    if (count := math.prod(map(len, values_of.values()))) > MOST_ANSWERS:
        raise ValueError(
            f"{count} combinations of {', '.join(values_of)} are more than {MOST_ANSWERS}: "
            "pass fewer values in few="
        )
    return values_of


def _choices(control: ipywidgets.Widget) -> list[tuple[str, Any]]:
    """Return every value that a control can have, with its text."""
    if isinstance(control, ipywidgets.IntSlider):
        return [(str(n), n) for n in range(control.min, control.max + 1, control.step)]
    options = list(control.options)
    # Interpret options as ipywidgets does: if all are pairs, each is a text and a value.
    if all(isinstance(option, tuple | list) and len(option) == 2 for option in options):
        return [(str(words), value) for words, value in options]
    return [(str(option), option) for option in options]


def _spread(values: list[Any], now: int) -> list[Any]:
    """Pick FEW_VALUES evenly spaced values; index ``now`` replaces the nearest inner one."""
    last = len(values) - 1
    if last < FEW_VALUES:
        return values
    places = [round(i * last / (FEW_VALUES - 1)) for i in range(FEW_VALUES)]
    if now not in places:
        inner = min(range(1, FEW_VALUES - 1), key=lambda i: abs(places[i] - now))
        places[inner] = now
    return [values[place] for place in places]
