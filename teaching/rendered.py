"""Execute lessons and keep their outputs, for the book and the slides."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from teaching import lessons
from teaching.answers import ANSWERS

WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
CELL_SECONDS = 300
# Lesson 15's explorer records dozens of layouts, which take a few seconds each on an idle machine.
ANSWERS_SECONDS = 3600
# The course's folder goes last, so that this changes nothing that the lesson imports.
ASK = f"""\
import sys
sys.path.append({str(lessons.ROOT)!r})
from teaching.answers import ask
ask()
sys.path.pop()
del ask"""
LIVE_ONLY = "*This explorer has sliders in JupyterLab.*"


def run(path: Path, cache: Path) -> nbformat.NotebookNode:
    """Execute a lesson in a fresh kernel; cache it in ``cache`` until it or the packages change.

    A widget is replaced with its first picture and a sentence that says it needs JupyterLab. The
    explorers' answers (``teaching.answers.answers``) are added as ANSWERS. Raises
    nbclient.exceptions.CellExecutionError if a cell fails.
    """
    kept = cache / f"{path.stem}-{_digest(path)}.ipynb"
    if not kept.exists():
        notebook = nbformat.read(path, as_version=4)
        _ask_explorers(notebook)
        with tempfile.TemporaryDirectory() as progress:
            environment = os.environ | {"COURSE_PROGRESS_DIR": progress}
            client = NotebookClient(
                notebook,
                timeout_func=lambda cell: ANSWERS_SECONDS if cell.source == ASK else CELL_SECONDS,
                resources={"metadata": {"path": str(path.parent)}},
                # A line may arrive in pieces, depending on when the kernel sends its output.
                coalesce_streams=True,
                # Otherwise, the kernel prints a warning that it's listening on this machine.
                extra_arguments=["--log-level=ERROR"],
            )
            client.execute(env=environment)
        _settle(notebook)
        cache.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, kept)
    return nbformat.read(kept, as_version=4)


def _digest(path: Path) -> str:
    """Return a digest of the lesson and the packages behind it."""
    digest = hashlib.sha256(path.read_bytes())
    for package in ("vgpu", "helpers", "teaching"):
        for source in sorted((lessons.ROOT / package).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _ask_explorers(notebook: nbformat.NotebookNode) -> None:
    """Ask each explorer for its answers right after its cell, in its state at that point."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "code" and "_explorer(" in cell.source:
            cells.append(nbformat.v4.new_code_cell(ASK))
    notebook.cells = cells


def _settle(notebook: nbformat.NotebookNode) -> None:
    kept = notebook.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    answers: dict[str, dict] = {}
    for cell in notebook.cells:
        if cell.source == ASK:
            for output in cell.outputs:
                answers |= output["data"][ANSWERS]
    notebook.cells = [cell for cell in notebook.cells if cell.source != ASK]
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        outputs = []
        for output in cell.outputs:
            if WIDGET in output.get("data", {}):
                within = list(_within(output["data"][WIDGET]["model_id"], kept))
                looks = [look for name in within for look in _first_look(name, kept)]
                data: dict[str, Any] = {
                    "text/markdown": LIVE_ONLY,
                    "text/plain": LIVE_ONLY.strip("*"),
                }
                if found := [answers[name] for name in within if name in answers]:
                    data[ANSWERS] = found
                # A progress bar is a widget, too, but nobody would miss it.
                if looks:
                    outputs += [*looks, nbformat.v4.new_output("display_data", data=data)]
            else:
                outputs.append(output)
        cell.outputs = outputs


def _within(model_id: str, kept: dict) -> Iterator[str]:
    """Yield the ids of the widget and everything it contains, in order."""
    yield model_id
    for child in kept.get(model_id, {}).get("state", {}).get("children", []):
        yield from _within(child.removeprefix("IPY_MODEL_"), kept)


def _first_look(model_id: str, kept: dict) -> list[nbformat.NotebookNode]:
    """Return what an output widget showed after the notebook had run; [] for other widgets."""
    outputs = kept.get(model_id, {}).get("state", {}).get("outputs", [])
    return [nbformat.from_dict(output) for output in outputs]
