"""An output that shows what a function draws and prints, for what its controls say now."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
from ipykernel.jsonutil import encode_images, json_clean
from IPython.utils.capture import capture_output


def live(
    function: Callable[..., None], controls: Mapping[str, ipywidgets.Widget]
) -> ipywidgets.Output:
    """An output that follows ``controls``: ``function`` is called with their values, by name.

    What it displays comes before what it prints; an error is shown with its traceback. In place of
    ``ipywidgets.interactive_output``, whose output travels to the notebook and back to the kernel:
    nbclient can then miss the end of a cell and never stop waiting (jupyter/nbclient#312).
    """
    shown = ipywidgets.Output()

    def answer(_: Any = None) -> None:
        values = {name: control.value for name, control in controls.items()}
        # All at once: the page does not jump between an empty and a full output.
        shown.outputs = tuple(_outputs(function, values))

    for control in controls.values():
        control.observe(answer, "value")
    answer()
    return shown


def _outputs(function: Callable[..., None], values: dict[str, Any]) -> list[dict[str, Any]]:
    """What a call displays and prints, as a notebook's cell holds it."""
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
