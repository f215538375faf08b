"""An explorer on a page without a kernel: its controls choose among precomputed answers."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import nbformat

from teaching.answers import ANSWERS

PICTURE = re.compile(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"')
NOTE = (
    "The controls choose among {count} answers, computed when this page was built. In JupyterLab, "
    "the explorer has more values, and computes each answer when you ask for it."
)
NO_SCRIPT = "Without JavaScript, only the first answer is shown."


def put_in_page(cell: nbformat.NotebookNode, pictures: Path) -> int:
    """Replace the first pictures of an executed cell's explorers with explorers for a page.

    Their pictures are written to the folder ``pictures``, which is ``_static/explorers`` on the
    page. Returns the number of answers.
    """
    outputs: list[nbformat.NotebookNode] = []
    count = 0
    for output in cell.get("outputs", ()):
        explorers = output.get("data", {}).get(ANSWERS)
        if not explorers:
            outputs.append(output)
            continue
        for found in explorers:
            # An explorer's first outputs come before its answers.
            del outputs[len(outputs) - len(found["answers"][_now(found)]) :]
        for number, found in enumerate(explorers):
            text = explorer(found, pictures, f"{cell.id}-{number}")
            data = {"text/html": text, "text/plain": "an explorer"}
            outputs.append(nbformat.v4.new_output("display_data", data=data))
            count += len(found["answers"])
    if count:
        cell.outputs = outputs
    return count


def seconds(cell: nbformat.NotebookNode) -> float:
    """Return how long the answers for an executed cell's explorers took to compute."""
    found = [output.get("data", {}).get(ANSWERS, []) for output in cell.get("outputs", ())]
    return float(sum(each["seconds"] for explorers in found for each in explorers))


def explorer(found: dict[str, Any], pictures: Path, name: str) -> str:
    """Return an explorer as HTML, from ``teaching.answers.answers``; ``name`` is its id."""
    parts = [_html(part, pictures) for part in found["parts"]]
    first = "".join(parts[part] for part in found["answers"][_now(found)])
    controls = [
        _control(control, f"explorer-{name}-{number}")
        for number, control in enumerate(found["controls"])
    ]
    return "\n".join(
        [
            f'<div class="explorer" id="explorer-{name}">',
            '<form class="explorer-controls" autocomplete="off" aria-label="Explorer" hidden>',
            *controls,
            "</form>",
            f'<div class="explorer-answer" aria-live="polite">{first}</div>',
            *(f"<template>{part}</template>" for part in parts),
            f'<script type="application/json">{json.dumps(found["answers"])}</script>',
            f'<p class="explorer-note">{NOTE.format(count=len(found["answers"]))}'
            f"<noscript> {NO_SCRIPT}</noscript></p>",
            "</div>",
        ]
    )


def place(positions: Sequence[int], counts: Sequence[int]) -> int:
    """Return the index of the answer for controls at these positions, as explorers.js does."""
    found = 0
    for position, count in zip(positions, counts, strict=True):
        found = found * count + position
    return found


def _now(found: dict[str, Any]) -> int:
    """Return the index of the answer for the controls' initial positions."""
    counts = [len(control["values"]) for control in found["controls"]]
    assert math.prod(counts) == len(found["answers"]), (
        "there must be an answer for every combination"
    )
    return place([control["now"] for control in found["controls"]], counts)


def _control(control: dict[str, Any], name: str) -> str:
    """Return HTML for a labeled slider or menu; if there's only one value, just its text."""
    values, now, label = control["values"], control["now"], escape(control["label"])
    words = escape(values[now])
    if len(values) == 1:
        return f"<p><span>{label}</span> <output>{words}</output></p>"
    if not control["slider"]:
        options = "".join(
            f"<option{' selected' if i == now else ''}>{escape(value)}</option>"
            for i, value in enumerate(values)
        )
        return f'<p><label for="{name}">{label}</label> <select id="{name}">{options}</select></p>'
    return (
        f'<p><label for="{name}">{label}</label> <input id="{name}" type="range" min="0" '
        f'max="{len(values) - 1}" value="{now}" aria-valuetext="{words}" '
        f'data-values="{escape(json.dumps(values))}"> <output for="{name}">{words}</output></p>'
    )


def _html(part: dict[str, Any], pictures: Path) -> str:
    """Return an output as HTML, with pictures as files; identical pictures share one file."""
    if part["output_type"] == "stream":
        return f"<pre>{escape(part['text'])}</pre>"
    if "text/html" not in part["data"]:
        return f"<pre>{escape(part['data']['text/plain'])}</pre>"

    def as_file(source: re.Match[str]) -> str:
        picture = base64.b64decode(source[1])
        name = hashlib.sha256(picture).hexdigest()[:16] + ".png"
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / name).write_bytes(picture)
        # The size, in bytes 16 to 23 of a PNG, reserves space before the picture has loaded.
        width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
        return f'src="_static/explorers/{name}" width="{width}" height="{height}"'

    return PICTURE.sub(as_file, part["data"]["text/html"])
