"""An output that shows what a function draws and prints for the current values of its controls."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
from ipykernel.jsonutil import encode_images, json_clean
from IPython.utils.capture import capture_output

Function = Callable[..., None]
Controls = Mapping[str, ipywidgets.Widget]
Few = Mapping[str, Sequence[Any]]

explorers: dict[str, tuple[Function, Controls, Few]] = {}
"""Explorers by their output's id; the site computes their answers (``teaching/answers.py``)."""


def live(function: Function, controls: Controls, few: Few | None = None) -> ipywidgets.Output:
    """Return an output that follows ``controls``, whose values ``function`` gets by name.

    What ``function`` displays comes before what it prints; an error is shown with its traceback.
    ``few`` maps the names of some controls to the values that a page without a kernel offers. ``live``
    replaces ``ipywidgets.interactive_output``, whose output is sent to the notebook and back to the
    kernel: nbclient can then miss the end of a cell and wait forever (jupyter/nbclient#312).
    """
    shown = ipywidgets.Output()

    def answer(_: Any = None) -> None:
        values = {name: control.value for name, control in controls.items()}
        # Set all outputs at once, so that the page doesn't flicker.
        shown.outputs = tuple(outputs(function, values))

    for control in controls.values():
        control.observe(answer, "value")
    answer()
    explorers[shown.model_id] = function, controls, few or {}
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


def outputs(function: Function, values: dict[str, Any]) -> list[dict[str, Any]]:
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
    found = [
        {
            "output_type": "display_data",
            "data": json_clean(encode_images(rich.data)),
            "metadata": json_clean(rich.metadata or {}),
        }
        for rich in (captured.outputs if captured._outputs else [])
    ]
    for name, text in (("stdout", captured.stdout), ("stderr", captured.stderr)):
        if text:
            found.append({"output_type": "stream", "name": name, "text": text})
    return [*found, failed] if failed else found
