"""An output that shows what a function draws and prints for the current values of its controls.

For a page without a kernel, ``answers`` precomputes its outputs for a few values of each control.
"""

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import ipywidgets
from ipykernel.jsonutil import encode_images, json_clean
from IPython.display import display
from IPython.utils.capture import capture_output

# The most values that a page without a kernel offers per control by default, and the most
# combinations in total.
FEW_VALUES, MOST_ANSWERS = 5, 120
ANSWERS = "application/vnd.course.answers+json"
"""The media type of what ``show_answers`` displays."""

Function = Callable[..., None]
Controls = Mapping[str, ipywidgets.Widget]
Few = Mapping[str, Sequence[Any]]

# Every explorer whose answers haven't been computed yet, by the id of its output.
_explorers: dict[str, tuple[Function, Controls, Few]] = {}


def live(function: Function, controls: Controls, few: Few | None = None) -> ipywidgets.Output:
    """Return an output that follows ``controls``, whose values ``function`` gets by name.

    What ``function`` displays comes before what it prints; an error is shown with its traceback.
    ``few`` maps the names of some controls to the values that a page without a kernel offers. This
    replaces ``ipywidgets.interactive_output``, whose output is sent to the notebook and back to the
    kernel: nbclient can then miss the end of a cell and wait forever (jupyter/nbclient#312).
    """
    shown = ipywidgets.Output()

    def answer(_: Any = None) -> None:
        values = {name: control.value for name, control in controls.items()}
        # Set all outputs at once, so that the page doesn't flicker.
        shown.outputs = tuple(_outputs(function, values))

    for control in controls.values():
        control.observe(answer, "value")
    answer()
    _explorers[shown.model_id] = function, controls, few or {}
    return shown


def explorer(
    function: Function, controls: Controls, few: Few | None = None, per_row: int = 3
) -> ipywidgets.VBox:
    """Return the controls in rows, with the output of ``live`` below them."""
    shown, every = live(function, controls, few), list(controls.values())
    rows = [every[start : start + per_row] for start in range(0, len(every), per_row)]
    return ipywidgets.VBox([*map(ipywidgets.HBox, rows), shown])


def steps(description: str, options: Sequence[Any], value: Any) -> ipywidgets.Widget:
    """Return a slider over ``options`` that updates only when released, since answers take time."""
    return ipywidgets.SelectionSlider(
        options=options,
        value=value,
        description=description,
        continuous_update=False,
        style={"description_width": "initial"},
    )


def show_answers() -> None:
    """Display the ``answers`` of explorers created since the last call, by output id."""
    every = {name: answers(*explorer) for name, explorer in _explorers.items()}
    _explorers.clear()
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
        shown = _outputs(function, setting)
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


def _outputs(function: Function, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a call displays and prints, as a notebook cell's outputs."""
    failed: dict[str, Any] | None = None
    with capture_output() as captured:
        try:
            function(**values)
        except Exception as error:
            lines = traceback.format_exception(error)
            failed = {
                "output_type": "error",
                "ename": type(error).__name__,
                "evalue": str(error),
                "traceback": lines,
            }
    outputs = [
        {
            "output_type": "display_data",
            "data": json_clean(encode_images(rich.data)),
            "metadata": json_clean(rich.metadata or {}),
        }
        for rich in (captured.outputs if captured._outputs else [])
    ]
    for name, text in (("stdout", captured.stdout), ("stderr", captured.stderr)):
        if text:
            outputs.append({"output_type": "stream", "name": name, "text": text})
    return [*outputs, failed] if failed else outputs
